"""Aborts the user's own collectives when another process is lost or has failed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from weakref import WeakMethod

_JOIN = 5.0  # seconds


class UserCollectives:
    """Aborts waits that are in vain: a process is lost, or its failure goes unnoticed here.

    The next exchange notices a failure. A process that begins none for as long as another one may
    be silent either waits for the process that has failed, or is busy with something else.
    """

    def __init__(self) -> None:
        self._aborts: set[WeakMethod[Callable[[], None]]] = set()
        self._beats = 0  # since there is a failure that is unnoticed
        self._thread: threading.Thread | None = None

    def add(self, abort: Callable[[], None]) -> None:
        """Add a method that aborts some waits, for as long as its object lives."""
        self._aborts.add(WeakMethod(abort))

    def abort(self) -> None:
        """Abort the waits, on another thread, so that heartbeats go on meanwhile."""
        if self._aborts:
            self._thread = threading.Thread(target=self._abort, name="gpipe-end-waits", daemon=True)
            self._thread.start()

    def join(self) -> None:
        """Wait until they are aborted."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN)

    def beat(self, limit: int, *, unnoticed: bool) -> None:
        """Abort the waits at the ``limit``-th beat in a row with an unnoticed failure."""
        self._beats = self._beats + 1 if unnoticed else 0
        if self._beats == limit:
            self.abort()

    def _abort(self) -> None:
        for reference in list(self._aborts):
            abort = reference()
            if abort is not None:
                abort()
