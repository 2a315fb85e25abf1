"""Whether other processes live, which is not whether they are quick.

A process may pause for as long as it likes, in a slow loader or while it saves. One that was killed
closes its connections, but one that was stopped, or that no network reaches any more, does not. So
each process lets the others hear it every now and then, from a thread that does nothing else, and
counts how often it has beaten itself since it last heard of each of them::

    rank 0   beat  beat  beat  beat  beat  beat  beat
    rank 1   beat  beat  stopped
    missed   0     0     1     2     3     4     5 -> rank 1 is lost

Beats are counted rather than seconds, so no clocks are compared, and a process that was stopped
itself does not blame the others for it. Anything that comes counts as a beat.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

from lightning_gpipe.core.transport.process_group.link import Link

_LONGEST = 1.0  # seconds between two beats
_BEATS = 12  # at least, in the time after which a silent process is lost
_SPARE = 2  # of them: the last one may be older than the event, and the next is when it is noticed
_JOIN = 5.0


class Watch:
    """Beats for this process, and tells which others are silent.

    Args:
        links: The connections to the others.
        lost_after: After how long a silent one is lost.
        start: How long one may be silent before it was heard for the first time.
        silent: Called with the ranks of those that are lost, once for each.
        beaten: Called after each beat.

    Attributes:
        limit: The number of beats that one may miss.
    """

    def __init__(
        self,
        links: Sequence[Link],
        lost_after: timedelta,
        start: timedelta,
        silent: Callable[[list[int]], None],
        beaten: Callable[[], None],
    ) -> None:
        self._links = links
        self._interval = min(_LONGEST, lost_after / timedelta(seconds=_BEATS))
        self.limit = int(lost_after.total_seconds() / self._interval) - _SPARE
        first = int(start.total_seconds() / self._interval)
        # How many beats each may miss; None: as many as it likes.
        self._allowed: dict[int, int | None] = {link.rank: first for link in links}
        self._missed = dict.fromkeys(self._allowed, 0)
        self._silent = silent
        self._beaten = beaten
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def start(self) -> None:
        """Beat and count, unless that was begun."""
        if self._thread is None:
            self._missed = dict.fromkeys(self._missed, 0)
            self._stop = threading.Event()
            self._thread = threading.Thread(
                target=self._run, args=(self._stop,), name="gpipe-watch", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """End the thread; who has not said that it ends is still expected after a start."""
        thread, self._thread = self._thread, None
        self._stop.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN)

    def heard(self, rank: int) -> None:
        """Take note that a process lives."""
        self._missed[rank] = 0
        self._allowed[rank] = self.limit

    def excuse(self, rank: int) -> None:
        """Expect nothing of a process until it is heard again."""
        self._allowed[rank] = None

    def _run(self, stop: threading.Event) -> None:
        self._beat()  # at once: from then on this process is missed
        while not stop.wait(self._interval):
            self._beat()
            for rank in self._missed:
                self._missed[rank] += 1
            if self._over(0):
                # Where a network is lost, so are several, of which one was heard a little later.
                silent = self._over(_SPARE)
                for rank in silent:
                    self.excuse(rank)
                self._silent(silent)
            self._beaten()

    def _beat(self) -> None:
        for link in self._links:
            link.beat()

    def _over(self, nearly: int) -> list[int]:
        """Those that have missed as many beats as they may, or ``nearly`` less."""
        return [
            rank
            for rank, allowed in self._allowed.items()
            if allowed is not None and self._missed[rank] >= allowed - nearly
        ]
