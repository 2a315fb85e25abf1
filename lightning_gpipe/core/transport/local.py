"""Workers as threads of one process, one for each device.

Threads see the same tensors, so on one device a value is handed over as it is. Each worker has one
inbox, a queue; whatever must reach it goes through that queue, bad news included, so a worker that
waits is woken at once when the run fails elsewhere, and no wait is without an end.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from queue import Empty, SimpleQueue

import torch
from typing_extensions import override

from lightning_gpipe.core.data import FlatTree
from lightning_gpipe.core.plan import Action, Layout, Route, Schedule
from lightning_gpipe.core.transport.copies import Copies, Parcel
from lightning_gpipe.core.transport.exclusion import Exclusion
from lightning_gpipe.core.transport.inline import InlineTransport
from lightning_gpipe.core.transport.interface import Cancelled, Exchange, Task, Transport
from lightning_gpipe.core.transport.threads import Outcomes, WorkerThread

# Seconds. A thread that died tells nobody, and Ctrl-C that strikes just before a wait does not end
# it: a waiting thread looks up now and then.
_LOOK_UP = 0.2
# How long a failed run waits for workers in the middle of an action before it tells the caller.
_GRACE = 0.5
_JOIN = 5.0


_Address = tuple[Action, Route | None]


class LocalExchange(Exchange):
    """One inbox for each worker, and one for the caller."""

    def __init__(self, layout: Layout, copies: Copies) -> None:
        self._copies = copies
        self._caller = len(layout.devices)
        # The inbox of each stage and, past the last and before the first, of the caller.
        self._inbox_of = [*layout.placement, self._caller]
        boxes = range(self._caller + 1)
        self._inboxes: list[SimpleQueue[tuple[_Address, Parcel] | None]] = [
            SimpleQueue() for _ in boxes
        ]
        self._arrived: list[dict[_Address, Parcel]] = [{} for _ in boxes]
        self._cancelled = False

    @override
    def send(self, to: Action, value: FlatTree, skip: Route | None = None) -> None:
        parcel = self._copies.pack(to, value, skip)
        self._inboxes[self._inbox_of[to.j]].put(((to, skip), parcel))

    @override
    def receive(self, at: Action, skip: Route | None = None) -> FlatTree:
        box, address = self._inbox_of[at.j], (at, skip)
        arrived = self._arrived[box]
        while address not in arrived:
            self._fetch(box, at)
        return self._copies.unpack(at, arrived.pop(address))

    def _fetch(self, box: int, at: Action) -> None:
        """Take the next parcel from an inbox, and wait for it a while if there is none."""
        self.check()
        try:
            mail = self._inboxes[box].get(timeout=_LOOK_UP)
        except Empty:
            if box == self._caller:  # a caller comes after the run: nothing is to come
                raise RuntimeError(
                    f"the run must end with what {at} needs, but made none"
                ) from None
            return
        if mail is not None:
            address, parcel = mail
            self._arrived[box][address] = parcel

    @override
    def check(self) -> None:
        if self._cancelled:
            raise Cancelled

    def cancel(self) -> None:
        """Give the run up, and wake all waiting workers."""
        self._cancelled = True
        for inbox in self._inboxes:
            inbox.put(None)


class LocalTransport(Transport):
    """One thread per worker, started when first needed.

    Args:
        layout: What runs where.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._devices = layout.devices
        self._copies: Copies | None = None
        self._crew = _Crew()
        self._exclusion = Exclusion(before=self._crew.finish)
        self._inline = InlineTransport(layout, self._exclusion)
        weakref.finalize(self, self._crew.join)  # if nobody calls close()

    @override
    def exclusive(self) -> AbstractContextManager[None]:
        if any(thread.current for thread in self._crew.threads):
            raise RuntimeError(
                "a layer must not run the pipeline that it is part of: it would wait for itself. "
                "Call the layers that are needed one by one instead."
            )
        return self._exclusion.entered()

    @override
    def open(self, phase: Schedule) -> LocalExchange:
        if self._copies is None:
            self._copies = Copies(self._layout)
        return LocalExchange(self._layout, self._copies)

    @override
    def run(self, exchange: Exchange, tasks: Sequence[Task]) -> None:
        assert isinstance(exchange, LocalExchange)
        with self.exclusive():
            threads = self._ensure_threads()
            self._crew.idle = False
            outcomes = Outcomes(len(tasks))
            try:
                for thread, task in zip(threads, tasks, strict=True):
                    thread.put(outcomes.of(partial(task.variables.copy().run, _perform, task)))
                while outcomes.pending and not outcomes.errors:
                    outcomes.wait(_LOOK_UP)
                    self._check_threads()
                if outcomes.errors:
                    raise outcomes.errors[0]
                self._crew.idle = True
            except BaseException:
                exchange.cancel()
                outcomes.wait_for_all(_GRACE)
                raise
            finally:
                outcomes.errors.clear()  # their tracebacks refer to this frame

    @override
    def inline(self) -> InlineTransport:
        return self._inline

    def __reduce__(self) -> tuple[type[LocalTransport], tuple[Layout]]:
        return LocalTransport, (self._layout,)  # a copy starts threads of its own

    @override
    def close(self) -> None:
        self._crew.join()

    def _check_threads(self) -> None:
        for w, thread in enumerate(self._crew.threads):
            if not thread.alive:
                raise RuntimeError(
                    f"the thread of worker {w} ({self._devices[w]}) must live as long as the "
                    "pipeline: it ended without a result. The next step starts a new one."
                )

    def _ensure_threads(self) -> list[WorkerThread]:
        """Start the threads that are missing, each with its share of the cores."""
        threads = self._crew.threads
        for w, device in enumerate(self._devices):
            if w < len(threads) and threads[w].alive:
                continue
            threads[w : w + 1] = [WorkerThread(f"gpipe-worker-{w} ({device})")]
        workers = zip(threads, self._devices, strict=True)
        _share_cores([thread for thread, device in workers if device.type == "cpu"])
        return threads


class _Crew:
    """The threads of a transport, and whether they are busy.

    Attributes:
        threads: One for each worker.
        idle: Whether all jobs of the last run have ended.
    """

    def __init__(self) -> None:
        self.threads: list[WorkerThread] = []
        self.idle = True

    def finish(self) -> None:
        """Wait for workers that are in the middle of an action of a run that failed.

        Their layers are in a state of that run's making.
        """
        if not self.idle:
            for thread in self.threads:
                thread.finish(_LOOK_UP)
            self.idle = True

    def join(self) -> None:
        """End the threads."""
        while self.threads:
            self.threads.pop().join(_JOIN)


def _perform(task: Task) -> None:
    with task.session():
        task.perform(task.row)


def _share_cores(threads: Sequence[WorkerThread]) -> None:
    """Give each thread an equal share of the intra-op threads that the caller has.

    How many threads an operator may use belongs to the thread that calls it, but to set it also
    sets the number for threads yet to come. So the workers take their share, and the caller then
    says again what it had.
    """
    mine = torch.get_num_threads()
    share = max(1, mine // max(1, len(threads)))
    untold = [thread for thread in threads if thread.intra_op != share]
    if not untold:
        return
    outcomes = Outcomes(len(untold))
    try:
        for thread in untold:
            thread.put(outcomes.of(partial(_use_threads, share)))
            thread.intra_op = share
        outcomes.wait_for_all(_JOIN)
    finally:
        torch.set_num_threads(mine)


def _use_threads(number: int) -> None:
    torch.get_num_threads()  # a new thread takes the default when first asked: not after the next
    torch.set_num_threads(number)
