"""The state of the other processes: which have failed, closed or been lost, and in which exchange.

All processes of a connection run the same exchanges in the same order, whichever of its pipelines
they are of. They are numbered by the failed runs so far, and by the exchanges begun since then::

    rank 0   (0, 1)  (0, 2) fails             (1, 1)  (1, 2)
    rank 1   (0, 1)  (0, 2) hears of failure  (1, 1)  (1, 2)

So after a failure all count alike again, whichever exchange each was in. A process that is behind
ends the exchanges before the failure, whose values are on their way to it, and fails in that one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import NamedTuple
from uuid import uuid4

from lightning_gpipe.core.layout import Layout
from lightning_gpipe.core.transport.interface import OutOfStep, RankFailed

_SENT = "_lightning_gpipe_told"  # in an error: for each ledger, the number of the next exchange
_ENDED = "has ended", "have ended"
_BITS = 32  # of the number of an exchange, for those begun since the last failure
AT_ONCE = -1  # a loss that leaves no exchange alone


class Failure(NamedTuple):
    """Other processes that have failed, closed or been lost; none if all wait for one another."""

    ranks: tuple[int, ...]
    how: str  # the rest of a sentence about them

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        """Make the failure that the others are told for an error of a process."""
        notes = [f"({note})" for note in getattr(error, "__notes__", [])]
        if isinstance(error, OutOfStep):  # which is of all, whichever notices
            return cls((), " ".join([str(error), *notes]))
        return cls((rank,), " ".join([f"failed: {type(error).__name__}: {error}", *notes]))

    @classmethod
    def ended(cls, ranks: Sequence[int]) -> Failure:
        """Make the failure that is none of theirs: these have come to their end."""
        return cls(tuple(ranks), _ENDED[len(ranks) > 1])

    def encode(self) -> str:
        return json.dumps(self)

    @classmethod
    def decode(cls, text: str) -> Failure:
        ranks, how = json.loads(text)
        return cls(tuple(ranks), how)

    def error(self, numbers: Sequence[int], layout: Layout | None = None) -> RankFailed | OutOfStep:
        if not self.ranks:
            return OutOfStep(self.how)
        error = RankFailed(f"{names_of(self.ranks, numbers, layout)} {self.how}")
        error.ended = self.how in _ENDED
        return error


def names_of(ranks: Sequence[int], numbers: Sequence[int], layout: Layout | None) -> str:
    """Name processes by their global ranks ``numbers``, and their stages if there is a layout."""
    names = []
    for rank in ranks:
        stages = [] if layout is None else layout.stages_at(rank)
        numbered = ", ".join(map(str, stages))
        where = f" (stage{'s' * (len(stages) > 1)} {numbered})" if stages else ""
        names.append(f"rank {numbers[rank]}{where}")
    return " and ".join(names)


def run_of(serial: int) -> int:
    """Return the number of failed runs before an exchange."""
    return serial >> _BITS


class Ledger:
    """Counts exchanges, and records failures; used by one thread at a time."""

    def __init__(self) -> None:
        self.failed = 0
        self.begun = 0
        self.closed = 0
        self.lost: Failure | None = None
        self.lost_ranks: set[int] = set()
        self._lost_after = math.inf  # the last exchange that the loss leaves alone
        # By the number of earlier failed runs: the exchange that failed, and how.
        self._failures: dict[int, tuple[int, Failure]] = {}
        self._closed_by: dict[int, tuple[int, int]] = {}  # how often others have, and when last
        self._name = uuid4().hex  # in errors that were sent
        self.ends = 0  # how often this process has ended
        self._ends_of: dict[int, tuple[int, int]] = {}  # how often others have, and after which

    @property
    def serial(self) -> int:
        return self.failed << _BITS | self.begun

    @property
    def state(self) -> tuple[int, int, int]:
        """The counts that are equal in processes that have done the same."""
        return self.failed, self.begun, self.closed

    @property
    def has_failed(self) -> bool:
        return self.failed > 0 and self.begun == 0

    def fail(self, *, running: bool) -> tuple[int, bool]:
        """Record that this process has failed; the next exchange is the first of another count.

        Return the number of the exchange that fails, and whether it did already elsewhere.
        """
        self.begun += not running  # between two the next one fails, since others can end this one
        serial, known = self.serial, self.failure is not None
        self._failures.pop(self.failed, None)
        self.failed += 1
        self.begun = 0
        return serial, known

    def mark_sent(self, error: BaseException) -> None:
        """Mark an error that others are told of: it passes several places that send it."""
        vars(error).setdefault(_SENT, {})[self._name] = self.serial

    def was_sent(self, error: BaseException | None) -> bool:
        """Return True if an error, or one that it was raised from, was sent, and none ran since."""
        while error is not None:
            if vars(error).get(_SENT, {}).get(self._name) == self.serial:
                return True
            error = error.__cause__ or error.__context__
        return False

    def record_failure(self, serial: int, failure: Failure) -> None:
        failed = run_of(serial)
        if failed >= self.failed:  # else several have failed in the same run
            entry = serial, failure
            self._failures[failed] = min(entry, self._failures.get(failed, entry))

    def close(self) -> bool:
        """Record that this process closes; return True if another one did so before."""
        follows = bool(self._closers())
        self.closed += 1
        return follows

    def record_close(self, rank: int, times: int, serial: int) -> None:
        """Record that another process has closed for the ``times``-th time, after an exchange."""
        self._closed_by[rank] = times, serial

    def end(self) -> None:
        self.ends += 1

    def record_end(self, rank: int, times: int, serial: int) -> bool:
        """Record another process's ``times``-th end, which comes after an exchange.

        Return True if this one has ended as often.
        """
        self._ends_of[rank] = times, serial
        return times <= self.ends

    def end_of(self, rank: int) -> int | None:
        """Return the last exchange of one that has ended while this has not, or None."""
        times, serial = self._ends_of.get(rank, (0, 0))
        return serial if times > self.ends else None

    @property
    def ended(self) -> Failure | None:
        """The processes that have ended while this one has not, or None."""
        ranks = tuple(rank for rank in self._ends_of if self.end_of(rank) is not None)
        return Failure.ended(ranks) if ranks else None

    def lose(self, ranks: Sequence[int], failure: Failure, after: int = AT_ONCE) -> bool:
        """Record that ``ranks`` cannot be reached any more; return True for the first failure.

        One that has ended ``after`` an exchange has sent all that is needed until then, such as the
        failure for which it has ended.
        """
        self.lost_ranks.update(ranks)
        if after >= self._lost_after:
            return False
        self.lost, self._lost_after = failure, after
        return True

    @property
    def failure(self) -> Failure | None:
        """The reason why the present exchange cannot go on, or None."""
        failure = self._failure_by(self.serial)  # a process that has failed may close at once
        if failure in (None, self.lost) and (closers := self._closers(before=self.serial)):
            return Failure(tuple(closers), "closed the pipeline")
        return failure

    @property
    def failure_next(self) -> Failure | None:
        """The reason why the next exchange cannot run, or None."""
        return self._failure_by(self.serial + 1)

    @property
    def failure_at_end(self) -> Failure | None:
        """The reason why the present exchange fails though all processes have finished, or None."""
        return self._failure_by(self.serial)

    def _failure_by(self, serial: int) -> Failure | None:
        if self._lost_after < serial:
            return self.lost
        failed_at, failure = self._failures.get(self.failed, (0, None))
        return failure if failed_at <= serial else None

    def _closers(self, before: float = math.inf) -> list[int]:
        """Return those that have closed before an exchange, while this one has not."""
        closes = self._closed_by.items()
        return [rank for rank, (times, at) in closes if times > self.closed and at < before]
