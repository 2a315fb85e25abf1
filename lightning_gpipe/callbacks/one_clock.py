"""Recorded times of several processes, on the clock of the first one.

``time.perf_counter`` is the same clock in all processes of a machine. Between machines it differs
by a constant. A process asks the first one for its time: if question and answer take equally long,
the answer was given halfway between them. The quickest answer is the most accurate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from time import perf_counter
from typing import TypeVar

from lightning_gpipe.core.run import Span
from lightning_gpipe.distributed import Group

T = TypeVar("T")

_QUESTIONS = 8


def all_of(group: Group | None, own: T) -> list[T]:
    """Return the value of each process by rank; without a group, that of this one."""
    return [own] if group is None else group.all(own)


def spans_of_all(group: Group | None, own: Sequence[Span], behind: float) -> list[Span]:
    """Return the actions of all processes, sorted by start, on the clock of the first.

    The clock of this process, with its ``own`` actions, is so many seconds ``behind``.
    """
    shifted = [x._replace(start=x.start + behind, end=x.end + behind) for x in own]
    return sorted(chain(*all_of(group, shifted)), key=lambda span: span.start)


def seconds_behind(
    group: Group | None, machine: str, now: Callable[[], float] = perf_counter
) -> float:
    """Return how many seconds the clock of this process is behind that of the first process.

    All processes of the group call this at once. Those of one ``machine`` share a clock.
    """
    if group is None or len(set(group.all(machine))) == 1:
        return 0.0
    answers = []
    for rank in range(1, group.size):
        for _ in range(_QUESTIONS):
            start = now()
            group.broadcast(None, rank)
            time_of_first = group.broadcast(now(), 0)
            end = now()
            if rank == group.rank:
                answers.append((end - start, time_of_first - (start + end) / 2))
    return min(answers)[1] if answers else 0.0
