"""Threads that run one job after another, the outcomes of those jobs, and shares of the cores.

A user may press Ctrl-C at any moment, which interrupts the calling thread at any line. So the
worker threads, which are not interrupted, record the end of each job and its error.

# Note [Threads end before the interpreter]
When the interpreter ends, Python before 3.14 ends a daemon thread that returns from C code by
unwinding its stack. Most functions of PyTorch release the interpreter's lock and take it again in a
destructor, which must not be unwound: the process prints "terminate called without an active
exception" and ends by SIGABRT, whatever its own error was. All threads of this package are daemons
that call PyTorch, except one that leaves other processes. So the owner of a thread joins it before
the interpreter ends, for some seconds at most. One that waits for longer, as for a store's answer,
is stopped for good where it waits.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import groupby
from queue import Empty, SimpleQueue
from time import monotonic
from types import FrameType

import torch
from typing_extensions import override

from lightning_gpipe.core.schedules import Action, Schedule
from lightning_gpipe.core.transport.interface import Task

JOIN = 5.0  # seconds
Job = Callable[[], None]
# Held while a thread has frames of others, and with them the values of calls that may have ended.
FRAMES = threading.RLock()


class WorkerThread(threading.Thread):
    """A named thread with a queue of jobs; its creator must end it with :meth:`end`.

    The operating system knows it by the first word of its name, 15 letters at most: profilers and
    debuggers show that. A job must not raise; :meth:`Outcomes.of` makes a job of any function, and
    records its error. ``intra_op`` is the number of threads that its operators may use, or 0 if
    that was not set; ``caller`` the thread that waits for the current job.
    """

    def __init__(self, name: str) -> None:
        # A daemon, so that a pipeline that was not closed does not keep the interpreter running.
        super().__init__(name=name, daemon=True)
        self.intra_op = 0
        self.caller: threading.Thread | None = None
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self.start()

    @override
    def run(self) -> None:
        torch.multiprocessing._set_thread_name(self.name.split()[0])
        while (job := self._jobs.get()) is not None:
            job()
            del job  # frees what it refers to while the thread waits for the next

    def put(self, job: Job) -> None:
        self._jobs.put(job)

    def work(self, job: Job) -> None:
        """Run ``job`` after the jobs before it, for the calling thread, which waits for it."""
        self.put(partial(self._work_for, threading.current_thread(), job))

    def _work_for(self, caller: threading.Thread, job: Job) -> None:
        self.caller = caller
        try:
            job()
        finally:
            self.caller = None

    def finish(self, poll: float) -> None:
        """Wait until the jobs so far are done, or the thread has died; check every ``poll`` s."""
        done = threading.Event()
        self.put(done.set)
        while self.is_alive() and not done.wait(poll):
            pass

    def end(self, timeout: float) -> None:
        """End the thread after the jobs so far, and wait for it, ``timeout`` seconds at most."""
        self._jobs.put(None)
        if self is not threading.current_thread():
            self.join(timeout)


def lineage() -> list[threading.Thread]:
    """Return the calling thread, the thread that waits for it as for a worker, and so on."""
    threads = [threading.current_thread()]
    while isinstance(threads[-1], WorkerThread) and threads[-1].caller is not None:
        threads.append(threads[-1].caller)
    return threads


def working_for(threads: Iterable[WorkerThread]) -> bool:
    """Return True if one of ``threads`` is the calling thread, or one that waits for it."""
    callers = lineage()
    return isinstance(callers[0], WorkerThread) and any(thread in callers for thread in threads)


class Outcomes:
    """Records the ends of jobs that several threads run, and their errors in order of time."""

    def __init__(self, number: int) -> None:
        self.errors: list[BaseException] = []
        self._number = number
        self._ended: list[None] = []
        self._wake: SimpleQueue[None] = SimpleQueue()

    @property
    def pending(self) -> int:
        return self._number - len(self._ended)

    def of(self, job: Job) -> Job:
        """Make a job that does not raise; its end and error are recorded here."""
        return partial(self._run, job)

    def wait(self, timeout: float) -> None:
        """Wait until all have ended, or one has failed, ``timeout`` seconds at most."""
        with suppress(Empty):
            self._wake.get(timeout=timeout)

    def wait_for_all(self, timeout: float) -> None:
        deadline = monotonic() + timeout
        while self.pending and (left := deadline - monotonic()) > 0:
            self.wait(left)

    def _run(self, job: Job) -> None:
        try:
            job()
        except BaseException as error:
            self.errors.append(error)
        finally:
            self._ended.append(None)
            if self.errors or not self.pending:  # wake the waiter only on an error or at the end
                self._wake.put(None)


def share_of(threads: int, workers: int) -> int:
    """Return the number of the caller's intra-op threads for each worker on the CPU."""
    return max(1, threads // max(1, workers))


def check_cores(cores: object, devices: Sequence[torch.device] = ()) -> None:
    """Refuse a ``cores`` that is not a positive integer, or is for workers that use no cores."""
    if cores is None:
        return
    if isinstance(cores, bool) or not isinstance(cores, int) or cores < 1:
        raise ValueError(f"cores must be None or a positive integer: got {cores!r}.")
    if others := [str(device) for device in devices if device.type != "cpu"]:
        raise ValueError(
            f"cores are shared by stages on the CPU: got cores={cores} for stages on "
            f"{', '.join(others)}. Leave it out."
        )


def perform_with(cores: int, phase: Schedule, task: Task, row: Sequence[Action]) -> None:
    """Perform some actions of a task, each with its number of intra-op threads.

    Workers that are at work at once share the cores. The schedule says when, so the numbers are
    those of any other transport.
    """
    at_work = phase.at_work
    for number, actions in groupby(row, lambda action: share_of(cores, at_work[action])):
        use_threads(number)
        task.perform(tuple(actions))


def share_cores(threads: Sequence[WorkerThread]) -> None:
    """Give each thread an equal share of the caller's intra-op threads."""
    # A thread's number holds for the operators that it calls, but setting it also sets the default
    # for new threads. So each worker sets its share, and then the caller sets its own number again.
    own = torch.get_num_threads()
    share = share_of(own, len(threads))
    others = [thread for thread in threads if thread.intra_op != share]
    if not others:
        return
    outcomes = Outcomes(len(others))
    try:
        for thread in others:
            thread.put(outcomes.of(partial(use_threads, share)))
            thread.intra_op = share
        outcomes.wait_for_all(JOIN)
    finally:
        torch.set_num_threads(own)


def use_threads(number: int) -> None:
    """Let the operators that the calling thread calls use ``number`` threads."""
    # The first call on a new thread sets its number to the default, so it must come first.
    if torch.get_num_threads() != number:
        torch.set_num_threads(number)


@contextmanager
def frames_of_threads() -> Iterator[dict[int, FrameType]]:
    """A ``with`` block with the present frame of each other thread, by the thread's identity.

    The stacks must be searched within it, where no garbage is collected. Before version 3.12,
    Python may collect some when it makes a frame object, and finalizers let other threads run. The
    object is then of a frame that has ended, in memory that others use. And a thread that starts
    while the first frames are made waits for ever, with the interpreter's lock.

    A frame that is held keeps what its call had, also after the call has ended. So none may be held
    after the block; the frame of the calling thread would hold them all, in a cycle.
    """
    with FRAMES:
        collects = gc.isenabled()
        gc.disable()
        frame_of = sys._current_frames()
        frame_of.pop(threading.get_ident())
        try:
            yield frame_of
        finally:
            frame_of.clear()
            if collects:
                gc.enable()
