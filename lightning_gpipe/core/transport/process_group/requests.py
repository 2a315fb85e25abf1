"""Requests to some processes, such as to stop, which all processes fulfil after the same step.

A process must not stop alone, and a vote in each step would cost time. So the processes count their
steps, and heartbeats carry the requests. A process that hears of one answers with its present step,
at whose end it waits until it knows the latest of these steps. All fulfil it after that one::

    rank 0   step 4   step 5: asked   waits at its end for a beat   step 6   stops
    rank 1   step 4   step 5                  step 6: hears of it            stops

Each process tells its parent in the tree the number of answers below it, and their latest step, and
the root tells the latest of all. The threads of the heartbeats answer, whatever the processes do.
Requests that are fulfilled and made again are told apart by the number of times.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from lightning_gpipe.core.transport.process_group.tree import Tree

_Told = Mapping[str, Sequence[int]]


class Requests:
    """The requests to the processes of a connection."""

    def __init__(self, tree: Tree, rank: int) -> None:
        self._size = tree.size
        self._is_root = tree.parent(rank) is None
        self._lock = threading.Lock()
        self._steps = 0  # that have ended here
        self._asked: set[str] = set()  # by signal handlers, which must not wait for the lock
        self._times: dict[str, int] = {}  # how often each request was fulfilled here
        self._ends: dict[str, int] = {}  # of each that is not yet: where this process waits
        self._below: dict[int, _Told] = {}  # what each child has told: times, answers, latest step
        # What the root has told: of which time it asks; and of which it knows the step, and which.
        self._above: dict[str, tuple[int, int, int]] = {}

    def ask(self, request: str) -> None:
        """Ask all processes to fulfil a request; a signal handler may call this."""
        self._asked.add(request)

    def to_parent(self) -> _Told:
        with self._lock:
            self._answer()
            return {k: (self._times.get(k, 0), *self._answers(k)) for k in self._ends}

    def to_children(self) -> _Told:
        with self._lock:
            self._answer()
            return {**self._above}

    def hear_child(self, rank: int, told: _Told) -> bool:
        """Record the answers of a child; return True if they are news."""
        with self._lock:
            news = self._below.get(rank, {}) != told
            self._below[rank] = told
            return news

    def hear_parent(self, told: _Told) -> bool:
        """Record the requests of the parent; return True if they are news."""
        with self._lock:
            above = {k: (asks, knows, step) for k, (asks, knows, step) in told.items()}
            news = self._above != above
            self._above = above
            return news

    def end_step(self) -> None:
        """Count a step; :meth:`due` must follow."""
        with self._lock:
            self._steps += 1

    def due(self, *, alone: bool) -> list[str] | None:
        """Return the requests that all fulfil after the present step; None if it is not known yet.

        ``alone`` is True if others have ended, and will not answer.
        """
        with self._lock:
            ends = {k: self._end_of(k, alone=alone) for k in self._ends}
            if None in ends.values():
                return None
            due = sorted(k for k, end in ends.items() if end is not None and end <= self._steps)
            for request in due:
                del self._ends[request]
                self._asked.discard(request)
                self._times[request] = self._times.get(request, 0) + 1
            return due

    def _answer(self) -> None:
        """Answer each new request; the root asks all others, too."""
        told = [self._above, *self._below.values()]
        for request in {*self._asked, *(k for each in told for k in each)}:
            times = self._times.get(request, 0)
            asked = (each[request][0] == times for each in told if request in each)
            if request in self._asked or any(asked):
                self._ends.setdefault(request, self._steps + 1)
        for request in self._ends if self._is_root else ():
            times, (answers, latest) = self._times.get(request, 0), self._answers(request)
            _, knows, step = self._above.get(request, (0, -1, 0))
            known = (times, latest) if answers == self._size else (knows, step)
            self._above[request] = (times, *known)

    def _answers(self, request: str) -> tuple[int, int]:
        below = [each[request] for each in self._below.values() if request in each]
        present = [each for each in below if each[0] == self._times.get(request, 0)]
        ends = [self._ends[request], *(step for _, _, step in present)]
        return 1 + sum(number for _, number, _ in present), max(ends)

    def _end_of(self, request: str, *, alone: bool) -> int | None:
        _, knows, step = self._above.get(request, (0, -1, 0))
        if knows == self._times.get(request, 0):
            return step
        return self._answers(request)[1] if alone else None
