"""Threads that run one job after another, and how those jobs ended.

A user may press Ctrl-C at any moment, which interrupts the calling thread at any line. So the
caller keeps no record that an interrupt could leave half-written: the end of each job and its error
are recorded by the worker threads, which are not interrupted.

# Note [Threads end before the interpreter]
At the end of the interpreter, Python before 3.14 ends a daemon thread that comes back from C code,
by unwinding its stack. Most functions of PyTorch release the lock of the interpreter, and take it
again in a destructor, which must not be unwound: the process prints "terminate called without an
active exception" and ends by SIGABRT, whatever its own error was. All threads of this package are
daemons, so that none keeps a process from ending, and call PyTorch. So whoever starts one joins it
before the interpreter ends, for some seconds at most.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic

import torch

Job = Callable[[], None]


class WorkerThread:
    """A named thread with a queue of jobs; its creator must end it with :meth:`join`.

    The operating system knows it by the first word of its name, 15 letters at most: profilers and
    debuggers show that.

    A job must not raise; :meth:`Outcomes.of` makes a job of any function, and records its error.

    Attributes:
        intra_op: How many threads its operators may use, or 0 if that was not set.
    """

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        # A daemon, so that a pipeline that was not closed does not keep the interpreter running.
        self._thread = _Thread(
            target=_serve, args=(self._jobs, name.split()[0]), name=name, daemon=True
        )
        self._thread.start()
        self.intra_op = 0

    @property
    def alive(self) -> bool:
        """Whether the thread can still run jobs."""
        return self._thread.is_alive()

    def put(self, job: Job) -> None:
        """Run ``job`` after the jobs before it."""
        self._jobs.put(job)

    def work(self, job: Job) -> None:
        """Run ``job`` after the jobs before it, for the calling thread, which waits for it."""
        self.put(partial(self._thread.work, job, threading.current_thread()))

    def finish(self, poll: float) -> None:
        """Wait until the jobs so far are done, or the thread has died.

        Args:
            poll: The interval between checks that it is alive, in seconds.
        """
        done = threading.Event()
        self.put(done.set)
        while self.alive and not done.wait(poll):
            pass

    def join(self, timeout: float) -> None:
        """End the thread after the jobs so far, and wait for it, ``timeout`` seconds at most."""
        self._jobs.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)


class _Thread(threading.Thread):
    """A thread that knows for which other one it works.

    Attributes:
        caller: The thread that waits for its present job, if there is one.
    """

    caller: threading.Thread | None = None

    def work(self, job: Job, caller: threading.Thread) -> None:
        """Run ``job`` for ``caller``, on this thread."""
        self.caller = caller
        try:
            job()
        finally:
            self.caller = None


def lineage() -> list[threading.Thread]:
    """The calling thread, the one that waits for it as for a worker, and so on."""
    found = [threading.current_thread()]
    while isinstance(found[-1], _Thread) and found[-1].caller is not None:
        found.append(found[-1].caller)
    return found


def working_for(threads: Iterable[WorkerThread]) -> bool:
    """Whether one of these is the calling thread, or one that waits for it."""
    found = lineage()
    return isinstance(found[0], _Thread) and any(each._thread in found for each in threads)


class Outcomes:
    """How a number of jobs, given to several threads, ended.

    Attributes:
        errors: What they raised, in order of time.
    """

    def __init__(self, number: int) -> None:
        self.errors: list[BaseException] = []
        self._number = number
        self._ended: list[None] = []
        self._wake: SimpleQueue[None] = SimpleQueue()

    @property
    def pending(self) -> int:
        """The number of jobs that have not ended yet."""
        return self._number - len(self._ended)

    def of(self, job: Job) -> Job:
        """A job that does not raise, and whose end and error are recorded here."""
        return partial(self._run, job)

    def wait(self, timeout: float) -> None:
        """Wait until all have ended, or one has failed, ``timeout`` seconds at most."""
        with suppress(Empty):
            self._wake.get(timeout=timeout)

    def wait_for_all(self, timeout: float) -> None:
        """Wait for all jobs to end, ``timeout`` seconds at most."""
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


def _serve(jobs: SimpleQueue[Job | None], name: str) -> None:
    torch.multiprocessing._set_thread_name(name)
    while (job := jobs.get()) is not None:
        job()
        del job  # frees what it refers to while the thread waits for the next
