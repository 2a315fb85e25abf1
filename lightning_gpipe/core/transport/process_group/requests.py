"""Requests to some processes, such as to stop, which all processes fulfil after the same step.

A process that is told to stop must not do so alone, and a vote in each step would cost time. So the
processes count their steps, and heartbeats carry the requests. A process that has heard of one
tells the step at whose end it waits: the present one. It waits there until it knows these steps of
all, and all fulfil the request after the latest of them::

    rank 0   step 4   step 5: asked   waits at its end for a beat   step 6   stops
    rank 1   step 4   step 5                  step 6: hears of it            stops

The thread of the heartbeat answers, whatever the process does, so nobody waits for more than two
beats.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping


class Requests:
    """The requests to the processes of a connection.

    Args:
        rank: The number of this process among them.
        size: The number of processes.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._lock = threading.Lock()
        self._steps = 0  # that have ended here
        self._asked: set[str] = set()  # by signal handlers, which must not wait for the lock
        self._ends: dict[str, dict[int, int]] = {}  # of each request: where each process waits
        self._own_ends: dict[str, int] = {}  # the latest
        self._fulfilled: dict[str, int] = {}  # after which step the latest was

    def ask(self, request: str) -> None:
        """Ask all processes to fulfil a request; a signal handler may call this."""
        self._asked.add(request)

    def tell(self) -> Mapping[str, int]:
        """Return for each request the step at whose end this process waits, for a heartbeat."""
        with self._lock:
            for request in {*self._asked, *self._ends}:
                ends = self._ends.setdefault(request, {})
                self._own_ends[request] = ends.setdefault(self._rank, self._steps + 1)
            return {**self._own_ends}

    def hear(self, rank: int, ends: Mapping[str, int]) -> None:
        """Record what a heartbeat of another process tells."""
        with self._lock:
            for request, step in ends.items():
                if step > self._fulfilled.get(request, 0):
                    self._ends.setdefault(request, {}).setdefault(rank, step)

    def end_step(self) -> None:
        """Count a step; :meth:`due` must follow."""
        with self._lock:
            self._steps += 1

    def due(self, absent: Collection[int]) -> list[str] | None:
        """Return the requests that all fulfil after the present step; None if it is not known yet.

        Args:
            absent: The processes that have ended, of which nothing will be heard.
        """
        with self._lock:
            known = {k: ends for k, ends in self._ends.items() if self._rank in ends}
            if any(len({*ends, *absent}) < self._size for ends in known.values()):
                return None
            due = sorted(k for k, ends in known.items() if max(ends.values()) <= self._steps)
            for request in due:
                del self._ends[request]
                self._asked.discard(request)
                self._fulfilled[request] = self._steps
            return due
