"""The post office of a process: what goes to other processes, and what comes from them.

All processes run the same phases of the same mini-batches in the same order, and number them. What
comes for a phase that this process has not begun waits for it. Each header says which phase of
which mini-batch, in which mode, and in which state of the generators of random numbers the sender
was; if one of them differs, the processes do not do the same, and both say so.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from lightning_gpipe.core.data import FlatTree
from lightning_gpipe.core.plan import Action, Layout, Route
from lightning_gpipe.core.transport.interface import Label
from lightning_gpipe.core.transport.process_group.bodies import Coder
from lightning_gpipe.core.transport.process_group.groups import Connection
from lightning_gpipe.core.transport.process_group.link import Link, Mail, Posted, wait
from lightning_gpipe.core.transport.process_group.message import Code, Header
from lightning_gpipe.core.transport.process_group.watch import Watch
from lightning_gpipe.core.transport.threads import WorkerThread

_POLL = 0.2
_TOLD_WITHIN = 5.0  # seconds
_LINGER = 1.0  # the same if one is lost, so that others may read who before this one ends
_TOLD = "_lightning_gpipe_told"  # in an error: the number of the next exchange when it was told
_BITS = 32  # of the number of an exchange, for those that were begun since the last failure


class RankFailed(RuntimeError):
    """Another process of the pipeline has failed, or is lost."""


class OutOfStep(RuntimeError):
    """Another process of the pipeline does something else."""


class Recipient(Protocol):
    """What gets the mail of one phase."""

    label: Label

    def arrive(self, mail: Mail, bits: int) -> None:
        """Take a value, and the bits that were signalled with it."""

    def fail(self, error: RankFailed | OutOfStep) -> None:
        """End with this error."""


class Office:
    """Sends and receives for one process.

    Exchanges are numbered: by how many runs have failed, and by how many were begun since. So after
    a failure all processes count alike again, whichever phase each of them was in.

    Args:
        layout: What runs where.
        connection: That of the owners; the rank in it is that of the layout.
    """

    def __init__(self, layout: Layout, connection: Connection) -> None:
        self._layout = layout
        self._timeout = connection.timeout
        self._lock = threading.RLock()  # a garbage collection may close what is no longer used
        self._process = os.getpid()
        self._failed = 0
        self._begun = 0
        self._recipient: Recipient | None = None
        self._early: dict[int, list[tuple[int, Header, Mail]]] = {}
        # By how many runs had failed before: in which exchange, and how.
        self._failures: dict[int, tuple[int, str]] = {}
        self._closed = 0
        self._closed_by: dict[int, int] = {}  # how often others have closed
        self._lost: str | None = None
        self._lost_ranks: set[int] = set()
        self._posted: list[Posted] = []
        self._waiter: WorkerThread | None = None
        coder = Coder(layout.routes)
        self._links = {
            rank: Link(connection, rank, coder, self._deliver, self._heard, self._disconnect)
            for rank in layout.ranks
            if rank != layout.rank
        }
        links = list(self._links.values())
        self._watch = Watch(links, connection.timeout, connection.patience, self._miss)
        self._started = False

    @property
    def begun(self) -> int:
        """How many phases were begun since a run failed; the same in all connection."""
        return self._begun

    def start(self) -> None:
        """Receive, and watch whether the others live."""
        self._started = True
        if self._waiter is None or not self._waiter.alive:
            self._waiter = WorkerThread("gpipe-sent")
        for link in self._links.values():
            link.start()
        self._watch.start()

    def begin(self, recipient: Recipient) -> int:
        """Begin the next phase; returns its number.

        Raises:
            RankFailed: If another process has failed since the last one, closed, or is lost.
        """
        self.start()
        with self._lock:
            self._begun += 1
            serial = self._serial
            self._recipient = recipient
            failed = self._failure()
            early = self._early.pop(serial, [])
        if failed is not None:
            raise RankFailed(failed)
        for rank, header, mail in early:
            self._hand_over(recipient, rank, header, mail)
        return serial

    def end(self) -> None:
        """End a phase.

        Raises:
            RankFailed: If another process has failed in it.
        """
        with self._lock:
            self._recipient = None
            failed = self._lost or self._failed_now()
        if failed is not None:
            raise RankFailed(failed)

    def post(
        self, rank: int, header: Header, to: Action, route: Route | None, value: FlatTree
    ) -> None:
        """Send a value to another process."""
        posted = self._links[rank].post(header, to, route, value)
        with self._lock:
            self._posted += posted

    def broadcast(self, header: Header, to: Action, route: Route | None, value: FlatTree) -> None:
        """Send a value to all other connection."""
        for rank in self._links:
            self.post(rank, header, to, route, value)

    def settle(self, check: Callable[[], None]) -> None:
        """Wait until all that was sent has gone.

        Args:
            check: Raises if there is no use in waiting any more.
        """
        with self._lock:
            posted, self._posted = self._posted, []
        if posted:
            gone = self._when_gone(posted)
            while not gone.wait(_POLL):
                check()

    def tell(self, error: BaseException) -> None:
        """Tell all others that this process has failed, unless they know.

        Their run ends with it, or their next one if none runs; the one after that works.
        """
        with self._lock:
            if vars(error).get(_TOLD) == self._serial:
                return  # and nothing was begun since
            # Between two phases it is the next one that fails: others can end this one.
            self._begun += self._recipient is None
            header = Header(Code.FAILURE, self._serial)
            known = self._failure() is not None
            self._failures.pop(self._failed, None)
            self._failed += 1
            self._begun = 0
            self._recipient = None
            self._early = {k: early for k, early in self._early.items() if k > self._serial}
            vars(error)[_TOLD] = self._serial
        if not known and self._started:
            gone = self._when_gone(self._tell_all(header, _text_of(error)))
            gone.wait(_TOLD_WITHIN)

    def close(self) -> None:
        """End the threads; others end theirs when they close too."""
        if not self._started or self._process != os.getpid():  # threads are not forked
            return
        self._started = False
        self._watch.stop()
        with self._lock:
            follows = bool(self._closers())
            self._closed += 1
            header = Header(Code.END, self._serial, slot=self._closed, bits=follows)
            living = [self._links[rank] for rank in self._links if rank not in self._lost_ranks]
        gone = self._when_gone(self._tell_all(header))
        within = _TOLD_WITHIN if self._lost is None else _LINGER
        deadline = time.monotonic() + within
        gone.wait(within)
        for link in living:
            link.join(max(0.0, deadline - time.monotonic()))
        if self._lost is not None:
            self._cut()
        elif self._waiter is not None:
            self._waiter.join(_TOLD_WITHIN)
            self._waiter = None

    def leave(self) -> None:
        """End for good, with the pipeline or the process, so that nothing waits any more."""
        if self._process != os.getpid():
            return
        error = getattr(sys, "last_value", None)  # that ends the process
        if error is not None:
            self.tell(error)
        self.close()
        self._cut()

    def _cut(self) -> None:
        """End all connections, and all threads that wait for them."""
        if self._lost is None:
            self._lost = "this process has ended its pipeline"
        for link in self._links.values():
            link.cut()
        for link in self._links.values():
            link.join(_TOLD_WITHIN)
        if self._waiter is not None:
            self._waiter.join(_TOLD_WITHIN)
            self._waiter = None

    @property
    def _serial(self) -> int:
        return self._failed << _BITS | self._begun

    def _failure(self) -> str | None:
        """Why the present phase cannot go on, if it cannot."""
        if closers := self._closers():
            return f"{self._named(closers)} closed the pipeline"
        return self._lost or self._failed_now()

    def _failed_now(self) -> str | None:
        serial, text = self._failures.get(self._failed, (0, None))
        return text if serial <= self._serial else None

    def _closers(self) -> list[int]:
        """Those that have closed the pipeline while this process has not."""
        return [rank for rank, times in self._closed_by.items() if times > self._closed]

    def _tell_all(self, header: Header, text: str = "") -> list[Posted]:
        """Send a header and a text to all others that can be reached."""
        posted: list[Posted] = []
        for rank, link in self._links.items():
            if rank not in self._lost_ranks:
                with suppress(RuntimeError):  # it is lost, as the receiving thread notices
                    posted += link.tell(header, text)
        return posted

    # For the links, on the threads that receive, and for the watch.

    def _heard(self, rank: int) -> None:
        self._watch.heard(rank)

    def _deliver(self, rank: int, header: Header, content: Mail | str | None) -> None:
        """Take what came from a process."""
        if isinstance(content, Mail):
            with self._lock:
                if header.serial > self._serial:
                    self._early.setdefault(header.serial, []).append((rank, header, content))
                    return
                recipient = self._recipient if header.serial == self._serial else None
            if recipient is not None:  # else it is of a run that has failed
                self._hand_over(recipient, rank, header, content)
        elif header.code == Code.END:
            self._end_of(rank, header)
        elif header.code == Code.LOST:
            self._lose([], str(content))
        else:
            self._fail_with(header, f"{self._named([rank])} failed: {content}")

    def _fail_with(self, header: Header, text: str) -> None:
        with self._lock:
            failed = header.serial >> _BITS
            if failed < self._failed:
                return  # several have failed in the same run
            found = header.serial, text
            self._failures[failed] = min(found, self._failures.get(failed, found))
            recipient = self._recipient if self._failed_now() else None
        if recipient is not None:
            recipient.fail(RankFailed(text))

    def _end_of(self, rank: int, header: Header) -> None:
        self._watch.excuse(rank)
        if header.bits:  # it was not the first, and who was is heard too
            return
        with self._lock:
            self._closed_by[rank] = header.slot
            # Of a phase in which all are, it has had its part.
            recipient = self._recipient if header.serial < self._serial else None
            failed = self._failure()
        if recipient is not None and failed is not None:
            recipient.fail(RankFailed(failed))

    def _disconnect(self, rank: int, error: BaseException) -> None:
        self._lose([rank], f"{self._named([rank])} is lost: {error}")

    def _miss(self, ranks: list[int]) -> None:
        seconds = self._timeout.total_seconds()
        self._lose(ranks, f"{self._named(ranks)} is lost: nothing was heard for {seconds:g} s")

    def _lose(self, ranks: Sequence[int], text: str) -> None:
        """Fail for good.

        Args:
            ranks: Those that cannot be reached any more; none if another process said so.
            text: What happened.
        """
        with self._lock:
            self._lost_ranks.update(ranks)
            known, self._lost = self._lost, self._lost or text
            recipient = self._recipient
        if known is not None:
            return
        if ranks:  # first of all, for the others see next that this one ends
            self._tell_all(Header(Code.LOST, 0), f"{text}, as rank {self._layout.rank} noticed")
        if recipient is not None:
            recipient.fail(RankFailed(text))

    def _hand_over(self, recipient: Recipient, rank: int, header: Header, mail: Mail) -> None:
        theirs = _label_of(header)
        if theirs != recipient.label:
            recipient.fail(OutOfStep(self._difference(rank, theirs, recipient.label)))
        else:
            recipient.arrive(mail, header.bits)

    def _difference(self, rank: int, theirs: Label, ours: Label) -> str:
        found = [
            f"{name} {one!r} there and {other!r} here"
            for name, one, other in zip(Label._fields, theirs, ours, strict=True)
            if one != other
        ]
        return (
            "all processes of a pipeline must run the same mini-batches in the same order, in the "
            f"same mode and with the same random numbers: {self._named([rank])} does not: "
            f"{', '.join(found)}. Let each process run the same code, and seed it equally."
        )

    def _named(self, ranks: Sequence[int]) -> str:
        layout = self._layout
        found = []
        for rank in ranks:
            stages = [j for j in range(layout.n) if layout.owner_of(j) == rank]
            listed = ", ".join(map(str, stages))
            found.append(f"rank {rank} (stage{'s' * (len(stages) > 1)} {listed})")
        return " and ".join(found)

    def _when_gone(self, posted: Sequence[Posted]) -> threading.Event:
        """An event that is set when all that was posted has gone."""
        gone = threading.Event()

        def wait_for_all() -> None:
            for each in posted:
                try:
                    wait(each)
                except RuntimeError:  # the receiving thread notices that it is lost
                    break
            else:
                gone.set()

        assert self._waiter is not None, "it was started"
        self._waiter.put(wait_for_all)
        return gone


def _label_of(header: Header) -> Label:
    return Label(*(getattr(header, name) for name in Label._fields))


def _text_of(error: BaseException) -> str:
    notes = [f"({note})" for note in getattr(error, "__notes__", [])]
    return " ".join([f"{type(error).__name__}: {error}", *notes])
