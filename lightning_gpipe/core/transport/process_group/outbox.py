"""What was sent and has not gone.

The copies in messages only have to live so long. Anything else must stay unchanged until then, so a
phase ends when it has gone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from lightning_gpipe.core.transport.process_group.link import Posted, wait
from lightning_gpipe.core.transport.threads import WorkerThread

_POLL = 0.2
_COPIES = 256  # of which it is not known whether they have gone
_JOIN = 5.0


class Outbox:
    """Knows when what was posted has gone; a thread waits for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._posted: list[Posted] = []
        self._copies: list[Posted] = []
        self._waiter: WorkerThread | None = None

    def start(self) -> None:
        """Start the thread, unless it runs."""
        if self._waiter is None or not self._waiter.alive:
            self._waiter = WorkerThread("gpipe-sent")

    def add(self, posted: Sequence[Posted]) -> None:
        """Take note of what was posted."""
        with self._lock:
            self._posted += (each for each in posted if not each.copied)
            self._copies += (each for each in posted if each.copied)

    def settle(self, check: Callable[[], None]) -> None:
        """Wait until all of it has gone but for copies.

        Args:
            check: Raises if there is no use in waiting any more.
        """
        with self._lock:
            posted, self._posted = self._posted, []
            copies = self._copies if len(self._copies) > _COPIES else []
            self._copies = [] if copies else self._copies
        if copies:
            self.gone(copies)  # which nobody waits for: it frees them
        if posted:
            gone = self.gone(posted)
            while not gone.wait(_POLL):
                check()

    def gone(self, posted: Sequence[Posted]) -> threading.Event:
        """An event that is set when all that was posted has gone."""
        return self._event(posted, all)

    def over(self, posted: Sequence[Posted]) -> threading.Event:
        """An event that is set when all that was posted has gone, or cannot go any more."""
        return self._event(posted, lambda gone: True)

    def _event(
        self, posted: Sequence[Posted], suffices: Callable[[list[bool]], bool]
    ) -> threading.Event:
        """An event that is set once it is known of each whether it has gone, if that suffices."""
        event = threading.Event()

        def wait_for_all() -> None:
            if suffices(list(map(_has_gone, posted))):
                event.set()

        assert self._waiter is not None, "it was started"
        self._waiter.put(wait_for_all)
        return event

    def end(self) -> None:
        """End the thread."""
        if self._waiter is not None:
            self._waiter.join(_JOIN)
            self._waiter = None


def _has_gone(posted: Posted) -> bool:
    """Wait until it has gone; False if it cannot, since the connection is lost."""
    try:
        wait(posted)
    except RuntimeError:  # as the receiving thread notices
        return False
    return True
