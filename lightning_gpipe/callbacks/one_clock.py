"""What the processes of a pipeline have recorded, together, by the clock of the first of them.

``time.perf_counter`` is the same clock in all processes of a machine. Between machines it differs
by a constant. A process asks the first one what time it is: the answer was given in the middle
between the question and its arrival, if both ways take equally long. That holds best for the answer
that came soonest.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from itertools import chain
from time import perf_counter
from typing import TypeVar

from lightning_gpipe.core.run import Span
from lightning_gpipe.processes import Group

T = TypeVar("T")

_QUESTIONS = 8


class OneClock:
    """The processes of a pipeline. All of them do the same with it, in the same order.

    Args:
        group: The processes; None if there is one.
        machine: Which machine this is.
        now: The time of its clock, in seconds.
    """

    def __init__(
        self,
        group: Group | None,
        machine: str | None = None,
        now: Callable[[], float] = perf_counter,
    ) -> None:
        self._group = group
        one = len(set(self.all(machine or platform.node()))) == 1
        self._behind = 0.0 if one or group is None else _behind(group, now)

    def all(self, own: T) -> list[T]:
        """What each process has, in the order of their ranks."""
        return [own] if self._group is None else self._group.all(own)

    def spans(self, own: Sequence[Span]) -> list[Span]:
        """The actions of all processes, sorted by start."""
        shifted = [
            each._replace(start=each.start + self._behind, end=each.end + self._behind)
            for each in own
        ]
        return sorted(chain(*self.all(shifted)), key=lambda span: span.start)


def _behind(group: Group, now: Callable[[], float]) -> float:
    """By how many seconds the clock of this process is behind that of the first."""
    answers = []
    for rank in range(1, group.size):
        for _ in range(_QUESTIONS):
            asked = now()
            group.broadcast(None, rank)
            theirs = group.broadcast(now(), 0)
            came = now()
            if rank == group.rank:
                answers.append((came - asked, theirs - (asked + came) / 2))
    return min(answers)[1] if answers else 0.0
