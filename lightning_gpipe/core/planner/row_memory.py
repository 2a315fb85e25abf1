"""The memory of a worker at the peak of its row.

A worker runs its row in order, however long it waits between two actions. So what it holds follows
from the row alone, without the times of the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import chain

import numpy as np

from lightning_gpipe.core.planner.action_costs import ActionCosts, Indices
from lightning_gpipe.core.schedules import Kind, Pattern, ScheduleKind, Visit

_CHANGE = {Kind.FORWARD: 1, Kind.BACKWARD: -1}  # of the micro-batches that are alive


class RowMemory:
    """The actions of one worker as arrays, in the order in which they change its memory."""

    def __init__(self, pattern: Pattern) -> None:
        forwards = backwards = _columns(pattern.forwards)
        if pattern.backwards is not pattern.forwards:
            backwards = _columns(pattern.backwards)
        self._stages = {*forwards[1].tolist()}
        number = np.arange(len(pattern.forwards))
        # Forward warm_up + k comes before backward k, the weights of backward k - late after it.
        self._visits: Mapping[Kind, tuple[tuple[Indices, Indices], Indices]] = {
            Kind.FORWARD: (forwards, 4 * (number - pattern.warm_up)),
            Kind.RECOMPUTE: (backwards, 4 * number + 1),
            Kind.BACKWARD: (backwards, 4 * number + 2),
            Kind.WEIGHTS: (backwards, 4 * (number + pattern.late) + 3),
        }
        self._order = np.argsort(np.concatenate([keys for _, keys in self._visits.values()]))

    def most_alive(self) -> dict[int, int]:
        """Return for each of its stages the most micro-batches between forward and backward."""
        visits = {kind: visit for kind, (visit, _) in self._visits.items()}
        stages = np.concatenate([of_kind[1] for of_kind in visits.values()])[self._order]
        changes = np.repeat([_CHANGE.get(kind, 0) for kind in visits], len(stages) // len(visits))
        changes = changes[self._order]
        return {j: int(changes[stages == j].cumsum().max()) for j in self._stages}

    def peak(self, costs: ActionCosts) -> float:
        """Return the most bytes that the actions hold at once, and those on their way."""
        changes = np.concatenate(
            [costs.changes(kind, *visits) for kind, (visits, _) in self._visits.items()]
        )
        total = changes[:, 0] + changes[:, 1]  # faster than a sum over so short an axis
        return float(total[self._order].cumsum().max()) + max(map(costs.under_way, self._stages))

    def least(
        self, costs: Callable[[int], ActionCosts], most: int, room: float, guess: int = 0
    ) -> int:
        """Return the least number by whose costs the row fits; ``most`` if none does.

        The search begins at a guess, as a neighbour's number is most often near.
        """

        def fits(number: int) -> bool:
            return self.peak(costs(number)) <= room

        least, guess, step = 0, min(guess, most), 1
        while least < most:
            if fits(guess):
                most, guess = guess, guess - step
            else:
                least, guess = guess + 1, guess + step
            if not least <= guess < most:
                guess = (least + most) // 2
            step *= 2
        return most


@lru_cache(maxsize=64)
def most_alive(order: ScheduleKind, m: int, placement: tuple[int, ...]) -> tuple[int, ...]:
    """Return for each stage the most micro-batches between their forward and their backward."""
    if not order.by_micro_batch:
        return (m,) * len(placement)
    numbers: dict[int, int] = {}
    if order.definition.patterns is not None:
        for row in row_memories(order, m, placement):
            numbers |= row.most_alive()
    else:
        alive = [0] * len(placement)
        for action in chain.from_iterable(order.build(m, placement, 0).rows):
            if action.kind in _CHANGE:
                alive[action.j] += _CHANGE[action.kind]
                numbers[action.j] = max(numbers.get(action.j, 0), alive[action.j])
    return tuple(numbers[j] for j in range(len(placement)))


@lru_cache(maxsize=1)  # of many workers they are large, and asked for again at once
def row_memories(order: ScheduleKind, m: int, placement: tuple[int, ...]) -> list[RowMemory]:
    """Return the row of each worker, of a schedule with patterns."""
    return list(map(RowMemory, order.patterns(m, placement)))


def _columns(visits: Sequence[Visit]) -> tuple[Indices, Indices]:
    """Return the micro-batches and the stages of visits."""
    numbers = np.fromiter(chain.from_iterable(visits), np.int64, 2 * len(visits))
    return numbers[::2], numbers[1::2]
