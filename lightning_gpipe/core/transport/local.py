"""Workers as threads of one process, one for each device.

Values for the same device are not copied. Each worker has one inbox for values and for the
cancellation of the run: a failure elsewhere wakes a waiting worker at once.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from queue import Empty, SimpleQueue

import torch
from typing_extensions import override

from lightning_gpipe.core.data import FlatTree
from lightning_gpipe.core.layout import Layout
from lightning_gpipe.core.programs import Route
from lightning_gpipe.core.schedules import Action, Schedule
from lightning_gpipe.core.transport.copies import Copies, Parcel
from lightning_gpipe.core.transport.exclusion import Exclusion
from lightning_gpipe.core.transport.inline import NESTED, InlineTransport
from lightning_gpipe.core.transport.interface import Exchange, Label, RunCancelled, Task, Transport
from lightning_gpipe.core.transport.threads import (
    JOIN,
    Job,
    Outcomes,
    WorkerThread,
    perform_with,
    share_cores,
    working_for,
)

# Seconds between checks while a thread waits: a thread that died sends nothing, and Ctrl-C just
# before a wait does not end it.
POLL = 0.2
# How long a failed run waits for workers in the middle of an action before it raises.
GRACE = 0.5

_Address = tuple[Action, Route | None]


class LocalExchange(Exchange):
    """One inbox for each worker, and one for the caller."""

    def __init__(self, layout: Layout, phase: Schedule, copies: Copies) -> None:
        self.phase = phase
        self._copies = copies
        self._caller = len(layout.devices)
        # The index of the inbox of each stage; at n and -1 the caller's.
        self._inbox_of = [*layout.placement, self._caller]
        indices = range(self._caller + 1)
        self._inboxes: list[SimpleQueue[tuple[_Address, Parcel] | None]] = [
            SimpleQueue() for _ in indices
        ]
        self._arrived: list[dict[_Address, Parcel]] = [{} for _ in indices]
        # Whether workers may still send something; most often the caller receives after the run.
        self._expects: Callable[[], bool] = lambda: False

    @override
    def send(self, to: Action, value: FlatTree, skip: Route | None = None) -> None:
        self.put(to, skip, *self._copies.pack(to, value, skip))

    def put(
        self, to: Action, skip: Route | None, value: FlatTree, ready: torch.cuda.Event | None
    ) -> None:
        """Put a value that is on the device of ``to`` into its inbox; see :class:`Copies`."""
        self._inboxes[self._inbox_of[to.j]].put(((to, skip), (value, ready)))

    @override
    def receive(self, at: Action, skip: Route | None = None) -> FlatTree:
        inbox, address = self._inbox_of[at.j], (at, skip)
        arrived = self._arrived[inbox]
        while (parcel := arrived.pop(address, None)) is None:
            self._fetch(inbox, at)
        value, ready = parcel
        return value if ready is None else self._copies.unpack(at, value, ready)

    def _fetch(self, inbox: int, at: Action) -> None:
        self.check()
        more = inbox != self._caller or self._expects()
        if not self._take(inbox) and not more:
            raise RuntimeError(f"a run must send what {at} needs: it ended without doing so.")

    def _take(self, inbox: int) -> bool:
        try:
            message = self._inboxes[inbox].get(timeout=POLL)
        except Empty:
            return False
        if message is not None:
            address, parcel = message
            self._arrived[inbox][address] = parcel
        return True

    def expect(self, more: Callable[[], bool]) -> None:
        """Let the caller receive for as long as ``more`` returns True; it may raise."""
        self._expects = more

    def wake(self) -> None:
        """Let a waiting caller check again whether workers may still send something."""
        self._inboxes[self._caller].put(None)

    def cancel(self) -> None:
        self.cancelled = True
        for inbox in self._inboxes:
            inbox.put(None)


class LocalTransport(Transport):
    """Runs each worker on a thread of its own, or of ``workers``, started when first needed."""

    def __init__(
        self, layout: Layout, workers: Workers | None = None, *, cores: int | None = None
    ) -> None:
        self._layout = layout
        self._devices = layout.devices_here
        pairs = zip(layout.workers_here, self._devices, strict=True)
        self._names = [f"{w} ({device})" for w, device in pairs]
        self._workers = workers or Workers(layout)
        self._pool = self._workers.pool
        cpus = sum(device.type == "cpu" for device in self._devices)
        self._cores = cores
        self._inline = InlineTransport(layout, self._workers.exclusion, shares=cpus, cores=cores)

    @override
    def exclusive(self) -> AbstractContextManager[None]:
        self._inline.refuse_nested()
        if working_for(self._pool.threads):
            raise RuntimeError(NESTED)
        return self._workers.exclusion.entered()

    @override
    def open(
        self, phase: Schedule, label: Label | None = None, awaited: Collection[Action] | None = None
    ) -> LocalExchange:
        return LocalExchange(self._layout, phase, self._inline.copies())

    @override
    def run(self, exchange: Exchange, tasks: Sequence[Task], caller: Task | None = None) -> None:
        assert isinstance(exchange, LocalExchange)
        with self.exclusive():
            threads = self._ensure_threads()
            self._pool.idle = False
            outcomes = Outcomes(len(tasks))
            try:
                for thread, task in zip(threads, tasks, strict=True):
                    perform = partial(_perform, task, exchange.phase, self._cores)
                    job = outcomes.of(partial(task.variables.copy().run, perform))
                    thread.work(job if caller is None else partial(_then, job, exchange.wake))
                if caller is not None:
                    self._perform_own(caller, exchange, outcomes)
                while outcomes.pending and not outcomes.errors:
                    outcomes.wait(POLL)
                    self._check_threads()
                if outcomes.errors:
                    raise outcomes.errors[0]
                self._pool.idle = True
            except BaseException:
                exchange.cancel()
                try:
                    outcomes.wait_for_all(GRACE)
                finally:
                    if outcomes.pending:
                        _abandon(tasks)
                raise
            finally:
                outcomes.errors.clear()  # their tracebacks refer to this frame
                if self._cores is not None:
                    torch.set_num_threads(torch.get_num_threads())  # new threads begin with it

    def _perform_own(self, caller: Task, exchange: LocalExchange, outcomes: Outcomes) -> None:
        def more() -> bool:
            self._check_threads()
            if outcomes.errors:
                raise RunCancelled
            return bool(outcomes.pending)

        exchange.expect(more)
        # Cancelled says that a worker has failed, whose error is raised then.
        with suppress(RunCancelled), self._inline.sharing(), caller.session():
            caller.perform(caller.row)

    @override
    def inline(self) -> InlineTransport:
        return self._inline

    @override
    def close(self) -> None:
        self._pool.end()

    def _check_threads(self) -> None:
        for name, thread in zip(self._names, self._pool.threads, strict=False):
            if not thread.is_alive():
                raise RuntimeError(
                    f"the thread of worker {name} must live as long as the pipeline: it ended "
                    "without a result. The next step starts a new one."
                )

    def _ensure_threads(self) -> list[WorkerThread]:
        """Start the threads that are missing or dead, each with its share of the cores."""
        threads = self._pool.threads
        for k, name in enumerate(self._names):
            if k == len(threads) or not threads[k].is_alive():
                threads[k : k + 1] = [WorkerThread(f"gpipe-worker-{name}")]
        if self._cores is None:
            workers = zip(threads, self._devices, strict=True)
            share_cores([thread for thread, device in workers if device.type == "cpu"])
        return threads


class Workers:
    """The threads of transports over the same devices, used by one caller at a time.

    Two pipelines of one model, such as an encoder and a decoder, share them and take turns: else
    the workers could wait for one another in different pipelines.
    """

    def __init__(self, *layouts: Layout) -> None:
        self.pool = _Pool()
        self.exclusion = Exclusion(*layouts, before=self.pool.finish)
        weakref.finalize(self, self.pool.end)  # in case close() is not called


class _Pool:
    """The threads, without a reference to their :class:`Workers`, whose finalizer ends them."""

    def __init__(self) -> None:
        self.threads: list[WorkerThread] = []
        self.idle = True

    def finish(self) -> None:
        """Wait for workers in an action of a failed run: until then layers have its changes."""
        if not self.idle:
            for thread in self.threads:
                thread.finish(POLL)
            self.idle = True

    def end(self) -> None:
        while self.threads:
            self.threads.pop().end(JOIN)


def _then(job: Job, callback: Callable[[], None]) -> None:
    job()  # which does not raise
    callback()


def _perform(task: Task, phase: Schedule, cores: int | None) -> None:
    with task.session():
        if cores is None:
            task.perform(task.row)
        else:
            perform_with(cores, phase, task, task.row)


def _abandon(tasks: Sequence[Task]) -> None:
    """Abandon ``tasks``, on a thread that Ctrl-C does not interrupt."""
    thread = threading.Thread(
        target=lambda: [task.abandon() for task in tasks], name="gpipe-abandon", daemon=True
    )
    thread.start()
    thread.join()
