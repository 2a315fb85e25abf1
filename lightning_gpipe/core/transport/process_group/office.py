"""The post office of a process: what goes to other processes, and what comes from them.

All processes run the same phases of the same mini-batches in the same order, and number them. What
comes for a phase that this process has not begun waits for it. Each header says which phase of
which mini-batch, in which mode, and in which state of the generators of random numbers the sender
was; if one of them differs, the processes do not do the same, and both say so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from torch.distributed import ProcessGroupGloo

from lightning_gpipe.core.data import FlatTree
from lightning_gpipe.core.plan import Action, Layout, Route
from lightning_gpipe.core.transport.interface import Label
from lightning_gpipe.core.transport.process_group.bodies import Coder
from lightning_gpipe.core.transport.process_group.link import Link, Mail, Posted
from lightning_gpipe.core.transport.process_group.message import Code, Header
from lightning_gpipe.core.transport.threads import WorkerThread

_POLL = 0.2
_TOLD = 5.0  # seconds to tell the others of a failure


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

    Args:
        layout: What runs where.
        group: The process group; the rank in it is that of the layout.
        pipeline: Which of the pipelines of the group.
    """

    def __init__(self, layout: Layout, group: ProcessGroupGloo, pipeline: int = 0) -> None:
        self._layout = layout
        self._lock = threading.Lock()
        self._serial = 0
        self._recipient: Recipient | None = None
        self._early: dict[int, list[tuple[int, Header, Mail]]] = {}
        self._failures: dict[int, str] = {}  # by serial
        self._lost: str | None = None
        self._posted: list[Posted] = []
        self._waiter: WorkerThread | None = None
        coder = Coder(layout.routes)
        self._links = {
            rank: Link(group, rank, coder, self._deliver, self._lose, pipeline)
            for rank in layout.ranks
            if rank != layout.rank
        }

    def begin(self, recipient: Recipient) -> int:
        """Begin the next phase; returns its number.

        Raises:
            RankFailed: If another process has failed in it already, or is lost.
        """
        for link in self._links.values():
            link.start()
        with self._lock:
            self._serial += 1
            self._recipient = recipient
            early = self._early.pop(self._serial, [])
            failed = self._lost or self._failures.pop(self._serial, None)
        if failed is not None:
            raise RankFailed(failed)
        for rank, header, mail in early:
            self._hand_over(recipient, rank, header, mail)
        return self._serial

    def post(
        self, rank: int, header: Header, to: Action, route: Route | None, value: FlatTree
    ) -> None:
        """Send a value to another process."""
        posted = self._links[rank].post(header, to, route, value)
        with self._lock:
            self._posted += posted

    def broadcast(self, header: Header, to: Action, route: Route | None, value: FlatTree) -> None:
        """Send a value to all other processes."""
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
        """Tell all others that this process has failed, unless it was told so by another."""
        if isinstance(error, RankFailed) or self._lost is not None:
            return
        header = Header(Code.FAILURE, self._serial)
        text = _text_of(error)
        try:
            posted = [each for link in self._links.values() for each in link.tell(header, text)]
        except RuntimeError:  # it is lost: it will be noticed there as well
            return
        self._when_gone(posted).wait(_TOLD)

    def close(self) -> None:
        """End the threads; others end theirs when they close too."""
        started = self._waiter is not None or self._serial
        if started and self._lost is None:
            header = Header(Code.END, self._serial)
            posted = [each for link in self._links.values() for each in link.tell(header)]
            self._when_gone(posted).wait(_TOLD)
            for link in self._links.values():
                link.join()
        if self._waiter is not None:
            self._waiter.join(_TOLD)
            self._waiter = None

    def _deliver(self, rank: int, header: Header, content: Mail | str | None) -> None:
        """Take what came from a process, on the thread that receives from it."""
        if header.code == Code.VALUE and isinstance(content, Mail):
            with self._lock:
                if header.serial > self._serial:
                    self._early.setdefault(header.serial, []).append((rank, header, content))
                    return
                recipient = self._recipient if header.serial == self._serial else None
            if recipient is not None:  # else it is of a run that has failed
                self._hand_over(recipient, rank, header, content)
            return
        with self._lock:
            recipient = self._recipient
            if header.code == Code.END:
                if header.serial == self._serial:  # it may close before others have ended
                    return
                text = f"{self._named(rank)} closed its pipeline"
            else:
                text = f"{self._named(rank)} failed: {content}"
                if header.serial > self._serial:
                    self._failures[header.serial] = text
                    return
        if recipient is not None:
            recipient.fail(RankFailed(text))

    def _lose(self, rank: int, error: BaseException) -> None:
        with self._lock:
            recipient = self._recipient
            if self._lost is None:
                self._lost = f"{self._named(rank)} is lost: {error}"
        if recipient is not None:
            recipient.fail(RankFailed(self._lost))

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
            f"same mode and with the same random numbers: {self._named(rank)} does not: "
            f"{', '.join(found)}. Let each process run the same code, and seed it equally."
        )

    def _named(self, rank: int) -> str:
        layout = self._layout
        stages = [j for j in range(layout.n) if layout.owner_of(j) == rank]
        return f"rank {rank} (stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))})"

    def _when_gone(self, posted: Sequence[Posted]) -> threading.Event:
        """An event that is set when all that was posted has gone."""
        if self._waiter is None or not self._waiter.alive:
            self._waiter = WorkerThread("gpipe-sent")
        gone = threading.Event()

        def wait() -> None:
            for work, _ in posted:
                try:
                    work.wait()
                except RuntimeError:  # the receiving thread notices that it is lost
                    break
            else:
                gone.set()

        self._waiter.put(wait)
        return gone


def _label_of(header: Header) -> Label:
    return Label(*(getattr(header, name) for name in Label._fields))


def _text_of(error: BaseException) -> str:
    notes = [f"({note})" for note in getattr(error, "__notes__", [])]
    return " ".join([f"{type(error).__name__}: {error}", *notes])
