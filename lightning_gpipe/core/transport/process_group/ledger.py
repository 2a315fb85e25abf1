"""What a process knows of the others: who has failed in which exchange, has closed, or is lost.

All processes of a connection run the same exchanges in the same order, whichever of its pipelines
they are of. They are numbered by how many runs have failed, and by how many were begun since::

    rank 0   (0, 1)  (0, 2) fails           (1, 1)  (1, 2)
    rank 1   (0, 1)  (0, 2)  is told of it  (1, 1)  (1, 2)

So after a failure all count alike again, whichever exchange each was in. One that is behind ends
those before the failure, whose values are on their way to it, and fails in that one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from lightning_gpipe.core.plan import Layout

_BITS = 32  # of the number of an exchange, for those that were begun since the last failure


class Verdict(NamedTuple):
    """What has happened to other processes.

    Attributes:
        ranks: Their ranks.
        how: What a sentence says of them.
    """

    ranks: tuple[int, ...]
    how: str

    def text(self, numbers: Sequence[int], layout: Layout | None = None) -> str:
        """In words, see :func:`named`."""
        return f"{named(self.ranks, numbers, layout)} {self.how}"


def named(ranks: Sequence[int], numbers: Sequence[int], layout: Layout | None = None) -> str:
    """Processes in words.

    Args:
        ranks: Their ranks among those that are connected.
        numbers: The ranks of these among all processes, by which the user knows them.
        layout: That of the pipeline, to name the stages.
    """
    found = []
    for rank in ranks:
        stages = (
            [] if layout is None else [j for j in range(layout.n) if layout.owner_of(j) == rank]
        )
        listed = ", ".join(map(str, stages))
        where = f" (stage{'s' * (len(stages) > 1)} {listed})" if stages else ""
        found.append(f"rank {numbers[rank]}{where}")
    return " and ".join(found)


class Ledger:
    """Counts exchanges, and records failures; used by one thread at a time.

    Attributes:
        failed: How many runs have failed.
        begun: How many exchanges were begun since.
        closed: How often this process has closed.
        lost: Who is lost, once anybody is: then nothing works any more.
        lost_ranks: Those that cannot be reached.
    """

    def __init__(self) -> None:
        self.failed = 0
        self.begun = 0
        self.closed = 0
        self.lost: Verdict | None = None
        self.lost_ranks: set[int] = set()
        # By how many runs had failed before: in which exchange, and how.
        self._failures: dict[int, tuple[int, Verdict]] = {}
        self._closed_by: dict[int, tuple[int, int]] = {}  # how often others have, and when last
        self._ends = 0  # how often this process has ended
        self._ends_of: dict[int, int] = {}  # how often others have

    @property
    def serial(self) -> int:
        """The number of the present exchange, or of the last one."""
        return self.failed << _BITS | self.begun

    @property
    def state(self) -> tuple[int, int, int]:
        """What is equal in processes that have done the same."""
        return self.failed, self.begun, self.closed

    def fail(self, *, running: bool) -> tuple[int, bool]:
        """Record that this process has failed; the next exchange is the first of another count.

        Args:
            running: Whether an exchange runs. Between two it is the next one that fails, since
                others can end this one.

        Returns:
            The number of the exchange that fails, and whether it did already in another process.
        """
        self.begun += not running
        serial, known = self.serial, self.failure is not None
        self._failures.pop(self.failed, None)
        self.failed += 1
        self.begun = 0
        return serial, known

    def hear(self, serial: int, verdict: Verdict) -> None:
        """Record that another process has failed in an exchange."""
        failed = serial >> _BITS
        if failed >= self.failed:  # else several have failed in the same run
            found = serial, verdict
            self._failures[failed] = min(found, self._failures.get(failed, found))

    def close(self) -> bool:
        """Record that this process closes; returns whether another one did so before."""
        follows = bool(self._closers())
        self.closed += 1
        return follows

    def end(self) -> None:
        """Record that this process ends: it sends nothing more until it starts again."""
        self._ends += 1

    def hear_end(self, rank: int) -> bool:
        """Record that another process ends; returns whether it does so after this one did.

        Then it may start again, as this one may have.
        """
        self._ends_of[rank] = self._ends_of.get(rank, 0) + 1
        return self._ends_of[rank] <= self._ends

    @property
    def ended(self) -> Verdict | None:
        """Who has ended while this process has not, if anybody has."""
        ranks = tuple(rank for rank, times in self._ends_of.items() if times > self._ends)
        return Verdict(ranks, "has ended" if len(ranks) == 1 else "have ended") if ranks else None

    def hear_closed(self, rank: int, times: int, serial: int) -> None:
        """Record that another process has closed for the ``times``-th time, after an exchange."""
        self._closed_by[rank] = times, serial

    def lose(self, ranks: Sequence[int], verdict: Verdict) -> bool:
        """Record that processes are lost; returns whether none was before.

        Args:
            ranks: Those that cannot be reached any more from here.
            verdict: Who is lost.
        """
        self.lost_ranks.update(ranks)
        first = self.lost is None
        self.lost = self.lost or verdict
        return first

    @property
    def failure(self) -> Verdict | None:
        """Why the present exchange cannot go on, if it cannot."""
        failed = self._failure_by(self.serial)  # a process that has failed may close at once
        if failed is None and (closers := self._closers(before=self.serial)):
            return Verdict(tuple(closers), "closed the pipeline")
        return self.lost or failed

    @property
    def failure_next(self) -> Verdict | None:
        """Why the next exchange cannot run, if it cannot."""
        return self.lost or self._failure_by(self.serial + 1)

    @property
    def failure_in_it(self) -> Verdict | None:
        """Which failure ends the present exchange, though all may have had their part, if any."""
        return self.lost or self._failure_by(self.serial)

    def _failure_by(self, serial: int) -> Verdict | None:
        """Which failure ends an exchange or one before it, of those since this process's last."""
        found, verdict = self._failures.get(self.failed, (0, None))
        return verdict if found <= serial else None

    def _closers(self, before: float = math.inf) -> list[int]:
        """Those that have closed while this process has not, without a part in an exchange."""
        closed = self._closed_by.items()
        return [rank for rank, (times, at) in closed if times > self.closed and at < before]
