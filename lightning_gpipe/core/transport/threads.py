"""A thread that runs one job after another until it is told to end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

Job = Callable[[], None]


class WorkerThread:
    """A named thread with a queue of jobs; whoever makes it joins it, with :meth:`join`.

    A job must not raise: what it has to tell, it tells in a way of its own.

    Attributes:
        intra_op: How many threads its operators may use, or 0 when it was not told.
    """

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        # A daemon, so that a pipeline that nobody closed does not keep the interpreter from ending.
        self._thread = threading.Thread(target=_serve, args=(self._jobs,), name=name, daemon=True)
        self._thread.start()
        self.intra_op = 0

    @property
    def alive(self) -> bool:
        """Whether the thread can still run jobs."""
        return self._thread.is_alive()

    @property
    def current(self) -> bool:
        """Whether it is this thread that asks."""
        return self._thread is threading.current_thread()

    def put(self, job: Job) -> None:
        """Run ``job`` after those before it."""
        self._jobs.put(job)

    def join(self, timeout: float) -> None:
        """End the thread after the jobs before, and wait for it, ``timeout`` seconds at most."""
        self._jobs.put(None)
        if not self.current:
            self._thread.join(timeout)


def _serve(jobs: SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # what it refers to must not live on while the thread waits for the next
