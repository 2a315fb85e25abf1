"""Whether each worker has a thread of its own, or one thread runs all of them.

Threads let devices compute at the same time. They also wait for one another, under the lock of one
interpreter, and wake one another for each value: where operators are small that costs more than it
brings. Which is faster depends on the model, the batches and the machine. What is computed is the
same.

A mini-batch of the slower way takes up to twice as long, so as few as possible are spent on finding
it. The first one begins the way that the size of the layers suggests, and only warms up. One with
threads tells how long they have computed, by the clock of each thread, which stands still while it
waits: one thread takes about as long for all of it. If that is longer than the mini-batch took,
threads are faster. If one thread has taken no longer for a micro-batch on a stage than to wake
another thread for it, one thread is faster. Only between the two both run in turns.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from math import inf
from time import perf_counter, thread_time
from typing import Literal, NamedTuple

import torch

from lightning_gpipe.core.faithful import NOTHING, Manager

THREADS, INLINE = False, True
_ROUNDS = 3  # mini-batches of each way, at most
_CLEAR = 1.2  # times as long is no accident
_AGAIN = 1000  # mini-batches after which the ways are compared again
_MORE = 1e-4  # seconds that threads compute more than one, for a micro-batch on a stage, at most
_SMALL = 1e-4  # seconds of a micro-batch on a stage: to wake a thread for it takes as long
_LARGE = 1e-3  # from there on threads are faster, unless something else keeps them from computing
_HEAVY = 1e6  # multiplications of a micro-batch on a stage, which take about as long
_KINDS = 16  # of mini-batches that are told apart, at most
_STARVED = 1.5  # times what the schedule allows
_LITTLE = 1e-3  # seconds of a micro-batch on a stage: a message between processes takes 0.3e-3


Threads = bool | Literal["auto"]


def check_threads(threads: object) -> None:
    """Check whether workers run on threads of their own.

    Raises:
        ValueError: If it is neither True, False nor "auto".
    """
    if threads not in (True, False, "auto"):
        raise ValueError(f"threads must be True, False or 'auto': got {threads!r}.")


class Found(NamedTuple):
    """How long a mini-batch of some kind takes in both ways.

    Attributes:
        threads: Seconds with a thread for each worker.
        inline: Seconds with one thread for all of them.
        allowed: Seconds by the schedule, if threads never waited for one another; None on GPUs,
            whose threads do not compute themselves, and where there is little to compute.
        clear: Whether mini-batches of the faster way showed it, so that the other time is a guess.
    """

    threads: float
    inline: float
    allowed: float | None = None
    clear: bool = False

    @property
    def faster(self) -> bool:
        """Which way is the faster one."""
        return INLINE if self.inline < self.threads else THREADS

    @property
    def starved(self) -> bool:
        """Whether threads take much longer than the schedule allows: they wait for a lock."""
        return self.allowed is not None and self.threads > _STARVED * self.allowed

    def __str__(self) -> str:
        one, many = (f"{1e3 * seconds:.1f} ms" for seconds in (self.inline, self.threads))
        if self.faster is INLINE:
            other = "too little for threads" if self.clear else f"{many} with a thread for each"
            return f"one thread for all devices: {one} per mini-batch, {other}"
        other = (
            f"in which they compute for {one}" if self.clear else f"{one} with one thread for all"
        )
        return f"a thread for each device: {many} per mini-batch, {other}"


class Way(NamedTuple):
    """How a mini-batch runs.

    Attributes:
        computed: Gets the seconds of processor time that each worker's thread takes in each phase.
        inline: Whether one thread runs all workers.
        timed: Entered around each phase.
    """

    computed: list[float]
    inline: bool = THREADS
    timed: Manager = NOTHING


class Ways:
    """Chooses the way of each mini-batch.

    Args:
        devices: Those of the workers.

    Attributes:
        found: What came of it for the kind of the latest mini-batch, once that is known.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self.found: Found | None = None
        devices = list(devices)
        self._gpus = [device for device in devices if device.type == "cuda"]
        self._at_once = min(len(devices), os.cpu_count() or 1)
        self._contests: OrderedDict[Hashable, Contest] = OrderedDict()

    def next(
        self,
        kind: Hashable,
        phases: int,
        pairs: int,
        work: float,
        bubble: float | None = None,
    ) -> Way:
        """The way of the next mini-batch.

        Args:
            kind: Equal for mini-batches that take about as long.
            phases: How many phases it has.
            pairs: The number of stages times that of micro-batches.
            work: How many multiplications a micro-batch takes on a stage, at least.
            bubble: The share of time in which a worker is idle by the schedule; None if threads
                are not compared with it.
        """
        if self._gpus:  # which compute by themselves, so that the processor's time tells nothing
            pairs, bubble = 0, None
        speed_up = 0.0 if bubble is None else self._at_once * (1 - bubble)
        contest = self._contests.pop(kind, None)
        if contest is None:
            begin = INLINE if pairs and work < _HEAVY else THREADS
            contest = Contest(pairs, speed_up, begin)
        self._contests[kind] = contest
        if len(self._contests) > _KINDS:
            self._contests.popitem(last=False)
        self.found = contest.found
        way, computed = contest.next(), list[float]()
        if way is None:
            assert contest.found is not None, "it goes on until something is found"
            return Way(computed, contest.found.faster)
        return Way(computed, way, _Timed(contest, way, phases, self._gpus, computed))


class Contest:
    """Mini-batches of one kind in either way, until it is known which is faster.

    Args:
        pairs: The number of stages times that of micro-batches; 0 where the processor's time does
            not tell how long one thread would take.
        speed_up: What the schedule allows threads; 0 if that is not known.
        begin: The way of the first mini-batch.

    Attributes:
        found: What came of it, if it has ended once.
    """

    def __init__(self, pairs: int = 0, speed_up: float = 0.0, begin: bool = THREADS) -> None:
        self.found: Found | None = None
        self._pairs = pairs
        self._speed_up = speed_up
        self._begin(begin)

    def _begin(self, way: bool) -> None:
        self._seconds: dict[bool, list[float]] = {THREADS: [], INLINE: []}
        self._first = self._next = way
        self._steady = True  # whether mini-batches on one thread computed all the time
        self._since = 0

    def next(self) -> bool | None:
        """The way to try with the next mini-batch; None if the contest has ended."""
        if self.found is not None and self._since < _AGAIN:
            self._since += 1
            return None
        return self._next

    def add(self, way: bool, seconds: float, computed: float) -> None:
        """Add how long a mini-batch took, and the processor time of its threads, in seconds."""
        if self.found is not None and self._since < _AGAIN:
            return  # it began before the contest ended
        threads, inline = self._seconds[THREADS], self._seconds[INLINE]
        (inline if way is INLINE else threads).append(seconds)
        if way is INLINE:
            self._steady &= seconds < _CLEAR * computed
        if len(threads) + len(inline) == 1:  # which has also chosen kernels and allocated memory
            large = computed > self._pairs * _LARGE
            again = self._pairs > 0 and large is (way is THREADS)
            self._next = way if again else not way
            return
        self._next = not way
        found = self._found_by_parts(way, seconds, computed) or self._compared()
        if found is not None:
            self.found = found
            self._begin(found.faster)

    def _found_by_parts(self, way: bool, seconds: float, computed: float) -> Found | None:
        """The result, if the parts of this mini-batch leave the other way no chance."""
        if way is THREADS and 0 < self._pairs * _MORE < computed - _CLEAR * seconds:
            return Found(seconds, computed, clear=True)  # one thread would compute for longer
        threads = min(self._seconds[THREADS], default=inf)
        if way is INLINE and seconds < min(threads, self._pairs * _SMALL):
            return Found(threads, seconds, clear=True)
        return None

    def _compared(self) -> Found | None:
        """The result by the times of both ways; None if more mini-batches are needed."""
        threads, inline = self._seconds[THREADS], self._seconds[INLINE]
        if not threads or not inline:
            return None
        # What else the machine does makes some of them take longer, and none shorter.
        many, one = min(threads), min(inline)
        known = self._speed_up and one > self._pairs * _LITTLE
        found = Found(many, one, one / self._speed_up if known else None)
        warm = len(inline) > (self._first is INLINE)
        clear = warm and self._steady and one > _CLEAR * many
        return found if clear or min(len(threads), len(inline)) >= _ROUNDS else None


class _Timed:
    """Measures how long the phases of one mini-batch take."""

    def __init__(
        self,
        contest: Contest,
        way: bool,
        phases: int,
        gpus: Iterable[torch.device],
        workers: Iterable[float],
    ) -> None:
        self._contest, self._way, self._left, self._gpus = contest, way, phases, gpus
        self._workers = workers
        self._seconds = self._computed = 0.0  # computed: by the caller's thread

    def __enter__(self) -> None:
        self._seconds -= perf_counter()
        self._computed -= thread_time()

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            for device in self._gpus:  # which may not have computed yet what they were given
                torch.cuda.synchronize(device)
            self._left -= 1
        self._seconds += perf_counter()
        self._computed += thread_time()
        if not self._left:
            self._contest.add(self._way, self._seconds, self._computed + sum(self._workers))
