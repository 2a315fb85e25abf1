"""What the user's code waits for besides, such as a collective to which others do not come."""

from __future__ import annotations

import threading
from collections.abc import Callable
from weakref import WeakMethod

_JOIN = 5.0


class OtherWaits:
    """Ends waits that are in vain: another process is lost, or its failure is not heeded.

    A failure is heeded by the next exchange. Who does not begin one for as long as a process may be
    silent either waits for the process that has failed, or has so much else to do.
    """

    def __init__(self) -> None:
        self._acts: set[WeakMethod[Callable[[], None]]] = set()
        self._beats = 0  # since there is a failure to heed
        self._thread: threading.Thread | None = None

    def add(self, act: Callable[[], None]) -> None:
        """Let a method of an object end some waits, for as long as the object lives."""
        self._acts.add(WeakMethod(act))

    def end(self) -> None:
        """End them, on a thread of its own: others must hear this process meanwhile."""
        if self._acts:
            self._thread = threading.Thread(target=self._act, name="gpipe-end-waits", daemon=True)
            self._thread.start()

    def join(self) -> None:
        """Wait until they have ended."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN)

    def _act(self) -> None:
        for each in list(self._acts):
            act = each()
            if act is not None:
                act()

    def beat(self, limit: int, *, unheeded: bool) -> None:
        """End them at the ``limit``-th beat in which there is a failure that is unheeded."""
        self._beats = self._beats + 1 if unheeded else 0
        if self._beats == limit:
            self.end()
