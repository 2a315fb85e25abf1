"""Heartbeats: which other processes are alive, however slow they are.

A process may pause for long, in a slow loader or while it saves. One that was killed closes its
connections, but one that was stopped, or that no network reaches any more, does not. So each
process sends heartbeats to its neighbours from a thread that does nothing else, and counts its own
beats since it last heard from each of them::

    rank 0   beat  beat  beat  beat  beat  beat  beat
    rank 1   beat  beat  stopped
    missed   0     0     1     2     3     4     5 -> rank 1 is lost

Beats are counted rather than seconds, so no clocks are compared, and a process that was stopped
itself does not blame the others for it. Any message counts as a beat.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

_LONGEST = 1.0  # seconds between two beats
_BEATS = 12  # at least, in the time after which a silent process is lost
_SPARE = 2  # of them: the last one may be older than the event, and the next is when it is noticed
_LATE = 0.5  # seconds beyond the time of a beat, in which this process did not run
_OF_LATE = 0.1  # of a late beat counts, so that also a machine that is always busy comes to an end
_JOIN = 5.0  # seconds


class Heartbeat:
    """Sends beats to the neighbours, and calls ``on_silent`` once with each that is lost.

    A process may be silent for ``lost_after``, and ``start`` times as long at the beginning.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        lost_after: timedelta,
        start: int,
        on_silent: Callable[[list[int]], None],
        send: Callable[[], None],
        on_beat: Callable[[], None],
    ) -> None:
        self._interval = min(_LONGEST, lost_after / timedelta(seconds=_BEATS))
        self.limit = int(lost_after.total_seconds() / self._interval) - _SPARE
        first_limit = int(start * lost_after.total_seconds() / self._interval)
        # The number of beats that each may miss; None if nothing is expected of it.
        self._allowed: dict[int, int | None] = dict.fromkeys(ranks, first_limit)
        self._missed = dict.fromkeys(self._allowed, 0.0)
        self._on_silent = on_silent
        self._send = send
        self._on_beat = on_beat
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def start(self) -> None:
        if self._thread is None:
            self._missed = dict.fromkeys(self._missed, 0.0)
            self._stop = threading.Event()
            self._thread = threading.Thread(
                target=self._run, args=(self._stop,), name="gpipe-watch", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """End the thread; after the next start, beats are expected of the same processes."""
        thread, self._thread = self._thread, None
        self._stop.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN)

    def reset(self, rank: int) -> None:
        if rank in self._allowed:
            self._missed[rank] = 0.0
            self._allowed[rank] = self.limit

    def excuse(self, rank: int) -> None:
        """Expect nothing of a process until it is heard again."""
        self._allowed[rank] = None

    def hears(self, rank: int) -> bool:
        """Return True if a process was heard recently, and is expected to be heard again."""
        return self._allowed.get(rank) == self.limit and self._missed[rank] < _SPARE

    def _run(self, stop: threading.Event) -> None:
        self._send()  # at once: from then on the others expect beats of this process
        began = time.monotonic()
        while not stop.wait(self._interval):
            late = time.monotonic() - began > self._interval + _LATE
            began = time.monotonic()
            self._send()
            for rank in self._missed:
                # A late beat: the machine is busy, and what was heard may not have been read yet.
                self._missed[rank] += _OF_LATE if late else 1.0
            if self._over(0):
                # A lost network loses several processes, of which some were heard a little later.
                silent = self._over(_SPARE)
                for rank in silent:
                    self.excuse(rank)
                self._on_silent(silent)
            self._on_beat()

    def _over(self, spare: int) -> list[int]:
        """Return the ranks that have missed as many beats as they may, or ``spare`` less."""
        return [
            rank
            for rank, allowed in self._allowed.items()
            if allowed is not None and self._missed[rank] >= allowed - spare
        ]
