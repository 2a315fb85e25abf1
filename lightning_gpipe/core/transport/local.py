"""Workers as threads of one process, one for each device.

Threads see the same tensors, so on one device a value is handed over as it is. Each worker has one
inbox, a queue; whatever must reach it goes through that queue, bad news included, so a worker that
waits is woken at once when the run fails elsewhere, and no wait is without an end.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from queue import Empty, SimpleQueue

import torch

from lightning_gpipe.core.data import FlatTree
from lightning_gpipe.core.plan import Action, Kind
from lightning_gpipe.core.skip import Route
from lightning_gpipe.core.transport.copies import Copies
from lightning_gpipe.core.transport.interface import Cancelled, Exchange, Transport
from lightning_gpipe.core.transport.threads import Job, Outcomes, WorkerThread

# Seconds. A thread that died tells nobody, and Ctrl-C that strikes just before a wait does not end
# it: whoever waits looks up now and then.
_LOOK_UP = 0.2
# How long a failed run waits for workers in the middle of an action before it tells the caller.
_GRACE = 0.5
_JOIN = 5.0


_Address = tuple[Action, Route | None]
_Mail = tuple[_Address, FlatTree, torch.cuda.Event | None]  # to whom, what, and when it may be read


class LocalExchange(Exchange):
    """One inbox for each worker, and one for the caller."""

    def __init__(self, n: int, devices: Sequence[torch.device], copies: Copies) -> None:
        self._n = n
        self._devices = devices
        self._copies = copies
        places = len(devices) + 1
        self._inboxes: list[SimpleQueue[_Mail | None]] = [SimpleQueue() for _ in range(places)]
        self._arrived: list[dict[_Address, _Mail]] = [{} for _ in range(places)]
        self._one_device = copies.one_device
        # The inbox of each stage and, past the last and before the first, of the caller.
        self._places = [*(j % len(devices) for j in range(n)), len(devices)]
        self._cancelled = False

    def send(self, to: Action, value: FlatTree, skip: Route | None = None) -> None:
        ready = None
        if not self._one_device or to.j == 0:  # what the caller sends may be on any device
            source, target = self._sender_of(to, skip), self._device_at(to.j)
            leaves, ready = self._copies.send(value.leaves, source, target)
            value = FlatTree(leaves, value.spec)
        self._inboxes[self._places[to.j]].put(((to, skip), value, ready))

    def receive(self, at: Action, skip: Route | None = None) -> FlatTree:
        place, address = self._places[at.j], (at, skip)
        arrived = self._arrived[place]
        while address not in arrived:
            self._fetch(place, at)
        _, value, ready = arrived.pop(address)
        if ready is not None:
            self._copies.accept(value.leaves, ready, self._device_at(at.j))
        return value

    def _fetch(self, place: int, at: Action) -> None:
        """Take the next piece of mail from an inbox, and wait for it a while if there is none."""
        self.check()
        try:
            mail = self._inboxes[place].get(timeout=_LOOK_UP)
        except Empty:
            if place == len(self._devices):  # a caller comes after the run: nothing is to come
                raise RuntimeError(
                    f"the run must end with what {at} needs, but made none"
                ) from None
            return
        if mail is not None:
            to, _, _ = mail
            self._arrived[place][to] = mail

    def check(self) -> None:
        if self._cancelled:
            raise Cancelled

    def cancel(self) -> None:
        """Give the run up, and wake whoever waits."""
        self._cancelled = True
        for inbox in self._inboxes:
            inbox.put(None)

    def _device_at(self, j: int) -> torch.device:
        """Where stage ``j`` is; the caller takes things where they were made."""
        return self._devices[min(max(j, 0), self._n - 1) % len(self._devices)]

    def _sender_of(self, to: Action, skip: Route | None) -> torch.device | None:
        """The device of the stage that makes what ``to`` needs; None for the caller's input."""
        if to.kind is Kind.FORWARD:
            j = to.j - 1 if skip is None else skip.source
            return None if j < 0 else self._device_at(j)
        return self._device_at(to.j + 1 if skip is None else skip.target)


class LocalTransport(Transport):
    """One thread per worker, started when first needed.

    Args:
        n: The number of stages.
        devices: The device of each worker; stage j is on the device of worker j mod d.
    """

    def __init__(self, n: int, devices: Sequence[torch.device]) -> None:
        self._n = n
        self._devices = tuple(devices)
        self._copies: Copies | None = None
        self._threads: list[WorkerThread] = []
        self._settled = True  # whether all jobs of the last run have ended
        # Two threads of the user take turns: their runs would wait for one another's workers, and
        # each would find the layers in a state of the other's making.
        self._turn = threading.RLock()
        weakref.finalize(self, _join, self._threads)  # if nobody calls close()

    @contextmanager
    def turn(self) -> Iterator[None]:
        if any(thread.current for thread in self._threads):
            raise RuntimeError(
                "a layer must not run the pipeline that it is part of: it would wait for itself. "
                "Call the layers that are needed one by one instead."
            )
        with self._turn:
            if not self._settled:
                # A worker may still be in the middle of an action of a run that failed, with its
                # layers in a state of that run's making.
                for thread in self._threads:
                    thread.finish(_LOOK_UP)
                self._settled = True
            yield

    def open(self) -> LocalExchange:
        if self._copies is None:
            self._copies = Copies(list(self._devices))
        return LocalExchange(self._n, self._devices, self._copies)

    def run(self, exchange: Exchange, jobs: Sequence[Job]) -> None:
        assert isinstance(exchange, LocalExchange)
        with self.turn():
            self._ensure_threads()
            self._settled = False
            outcomes = Outcomes(len(jobs))
            try:
                for thread, job in zip(self._threads, jobs, strict=True):
                    thread.put(outcomes.of(job))
                while outcomes.pending and not outcomes.errors:
                    outcomes.wait(_LOOK_UP)
                    self._check_threads()
                if outcomes.errors:
                    raise outcomes.errors[0]
                self._settled = True
            except BaseException:
                exchange.cancel()
                outcomes.settle(_GRACE)
                raise
            finally:
                outcomes.errors.clear()  # their tracebacks refer to this frame

    def __reduce__(self) -> tuple[type, tuple[int, tuple[torch.device, ...]]]:
        return type(self), (self._n, self._devices)  # a copy starts threads of its own

    def close(self) -> None:
        _join(self._threads)

    def _check_threads(self) -> None:
        for w, thread in enumerate(self._threads):
            if not thread.alive:
                raise RuntimeError(
                    f"the thread of worker {w} ({self._devices[w]}) must live as long as the "
                    "pipeline: it ended without a result. The next step starts a new one."
                )

    def _ensure_threads(self) -> None:
        """Start the threads that are missing, each with its share of the cores."""
        for w, device in enumerate(self._devices):
            if w < len(self._threads) and self._threads[w].alive:
                continue
            thread = WorkerThread(f"gpipe-worker-{w} ({device})")
            self._threads[w : w + 1] = [thread]
        on_cpu = [
            thread
            for thread, device in zip(self._threads, self._devices, strict=True)
            if device.type == "cpu"
        ]
        _share_cores(on_cpu)


def _join(threads: list[WorkerThread]) -> None:
    while threads:
        threads.pop().join(_JOIN)


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
        outcomes.settle(_JOIN)
    finally:
        torch.set_num_threads(mine)


def _use_threads(number: int) -> None:
    torch.get_num_threads()  # a new thread takes the default when first asked: not after the next
    torch.set_num_threads(number)
