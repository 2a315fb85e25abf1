"""Whether each worker has a thread of its own, or one thread runs all of them.

Threads let devices compute at the same time. They also wait for one another, under the lock of one
interpreter, and wake one another for each value: where operators are small that costs more than it
brings. Which is faster depends on the model, the batches and the machine. So both run some of the
first mini-batches in turns, and the faster one runs the others. What is computed is the same.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from time import perf_counter
from typing import Literal, NamedTuple

import torch

from lightning_gpipe.core.faithful import NOTHING, Manager

THREADS, INLINE = False, True
_ROUNDS = 3  # mini-batches of each way that count, after one that does not
_CLEAR = 3.0  # if one way is so many times as fast, one mini-batch of each shows it
_AGAIN = 1000  # mini-batches after which both are tried again
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
    """

    threads: float
    inline: float
    allowed: float | None = None

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
            return (
                f"one thread for all devices: {one} per mini-batch, {many} with a thread for each"
            )
        return f"a thread for each device: {many} per mini-batch, {one} with one thread for all"


class Way(NamedTuple):
    """How a mini-batch runs.

    Attributes:
        inline: Whether one thread runs all workers.
        timed: Entered around each phase.
    """

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
        self._at_once = 0 if self._gpus else min(len(devices), os.cpu_count() or 1)
        self._contests: OrderedDict[Hashable, Contest] = OrderedDict()

    def next(self, kind: Hashable, phases: int, bubble: float = 0.0, pairs: int = 0) -> Way:
        """The way of the next mini-batch.

        Args:
            kind: Equal for mini-batches that take about as long.
            phases: How many phases it has.
            bubble: The share of time in which a worker is idle by the schedule.
            pairs: The number of stages times that of micro-batches; 0 if threads are not compared
                with the schedule.
        """
        speed_up = self._at_once * (1 - bubble) if pairs else 0.0
        contest = self._contests.pop(kind, None) or Contest(speed_up, pairs)
        self._contests[kind] = contest
        if len(self._contests) > _KINDS:
            self._contests.popitem(last=False)
        self.found = contest.found
        way = contest.next()
        if way is None:
            assert contest.found is not None, "it goes on until something is found"
            return Way(contest.found.faster)
        return Way(way, _Timed(contest, way, phases, self._gpus))


class Contest:
    """Both ways in turns, for mini-batches of one kind.

    Args:
        speed_up: What the schedule allows threads; 0 if that is not known.
        pairs: The number of stages times that of micro-batches.

    Attributes:
        found: What came of it, if it has ended once.
    """

    def __init__(self, speed_up: float = 0.0, pairs: int = 0) -> None:
        self.found: Found | None = None
        self._speed_up = speed_up
        self._little = pairs * _LITTLE
        self._begin()

    def _begin(self) -> None:
        self._seconds: dict[bool, list[float]] = {THREADS: [], INLINE: []}
        self._since = 0

    def next(self) -> bool | None:
        """The way to try with the next mini-batch; None if the contest has ended."""
        if self.found is not None and self._since < _AGAIN:
            self._since += 1
            return None
        threads, inline = self._seconds[THREADS], self._seconds[INLINE]
        return INLINE if len(inline) < len(threads) else THREADS

    def add(self, way: bool, seconds: float) -> None:
        """Add how long a mini-batch took."""
        self._seconds[way].append(seconds)
        # The first one of each way chooses kernels and allocates memory.
        threads, inline = self._seconds[THREADS][1:], self._seconds[INLINE][1:]
        if not threads or len(threads) != len(inline):
            return
        # What else the machine does makes some of them take longer, and none shorter.
        one, many = min(inline), min(threads)
        known = self._speed_up and one > self._little
        found = Found(many, one, one / self._speed_up if known else None)
        if len(threads) >= _ROUNDS or max(found[:2]) > _CLEAR * min(found[:2]):
            self.found = found
            self._begin()


class _Timed:
    """Measures how long the phases of one mini-batch take."""

    def __init__(
        self, contest: Contest, way: bool, phases: int, gpus: Iterable[torch.device]
    ) -> None:
        self._contest, self._way, self._left, self._gpus = contest, way, phases, gpus
        self._seconds = self._begun = 0.0

    def __enter__(self) -> None:
        self._begun = perf_counter()

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:
            return
        for device in self._gpus:  # which may not have computed yet what they were given
            torch.cuda.synchronize(device)
        self._seconds += perf_counter() - self._begun
        self._left -= 1
        if not self._left:
            self._contest.add(self._way, self._seconds)
