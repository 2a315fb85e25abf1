"""Blocks that are drawn: schedules that users could write."""

from collections.abc import Sequence
from random import Random

from lightning_gpipe.core.schedules import Block


def drawn_block(placement: Sequence[int], random: Random, *, split: bool) -> Block:
    """A block in which each action waits for some clock cycles after the one that it needs."""
    n = len(placement)
    cycle = (2 + split) * n // (1 + max(placement))
    occupied: dict[int, set[int]] = {worker: set() for worker in placement}

    def placed(j: int, after: int) -> int:
        start = after + 1 + random.choice([0, 0, 0, 1, 2, cycle])
        while start % cycle in occupied[placement[j]]:
            start += 1
        occupied[placement[j]].add(start % cycle)
        return start

    now = random.randint(-3, 3)
    forwards, backwards = [0] * n, [0] * n
    for j in range(n):
        forwards[j] = now = placed(j, now)
    for j in reversed(range(n)):
        backwards[j] = now = placed(j, now)
    if not split:
        return tuple(zip(forwards, backwards, strict=True))
    weights = [placed(j, backwards[j]) for j in range(n)]
    return tuple(zip(forwards, backwards, weights, strict=True))
