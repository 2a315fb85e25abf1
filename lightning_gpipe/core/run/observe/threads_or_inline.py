"""The choice between a thread for each worker and one thread for all of them.

Threads let devices compute at the same time. They also share the lock of one interpreter, and wake
one another for each value: where operators are small that costs more than it gains. The faster
choice depends on the model, the batches and the machine; the results are the same.

Few mini-batches are spent on the comparison. The first one runs the way that the size of the layers
suggests, and only warms up. With threads, their clocks tell how long they have computed, and one
thread takes about the sum. If that is longer than the mini-batch took, threads are faster. If one
thread has taken no longer for a micro-batch on a stage than to wake another thread for it, one
thread is faster. Only between these bounds both run in turns.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from math import inf
from time import perf_counter, thread_time
from typing import ClassVar, Literal, NamedTuple

import torch

from lightning_gpipe.core.faithful import NOTHING, Manager, record

THREADS, INLINE = False, True

Threads = bool | Literal["auto"]


def check_threads(threads: object) -> None:
    """Raise ValueError if the argument ``threads`` of a pipeline has another value."""
    if threads not in (True, False, "auto"):
        raise ValueError(f"threads must be True, False or 'auto': got {threads!r}.")


@dataclass(frozen=True)
class Bounds:
    """The bounds of the comparison; times in seconds of a micro-batch on a stage."""

    rounds: int = 3  # the most mini-batches that run each way
    again: int = 1000  # mini-batches after which the comparison begins again
    kinds: int = 16  # the most kinds of mini-batches that are told apart
    clear: float = 1.2  # a ratio of two times that is no accident
    heavy: float = 1e6  # multiplications from which the first mini-batch runs on threads
    large: float = 1e-3  # from which threads are faster, unless something keeps them from computing
    small: float = 1e-4  # up to which one thread is faster: to wake another one takes as long
    overhead: float = 1e-4  # the most that threads compute more than one thread does


class RunTimes(NamedTuple):
    """The times of a mini-batch of some kind with threads and with one thread, in seconds."""

    threads: float
    inline: float
    clear: bool = False  # mini-batches of the faster way were enough; the other time is a guess

    @property
    def faster(self) -> bool:
        """The faster way, THREADS or INLINE."""
        return INLINE if self.inline < self.threads else THREADS

    def __str__(self) -> str:
        one, many = (f"{1e3 * seconds:.1f} ms" for seconds in (self.inline, self.threads))
        if self.faster is INLINE:
            other = "too little for threads" if self.clear else f"{many} with a thread for each"
            return f"one thread for all devices: {one} per mini-batch, {other}"
        other = (
            f"in which they compute for {one}" if self.clear else f"{one} with one thread for all"
        )
        return f"a thread for each device: {many} per mini-batch, {other}"


class Execution(NamedTuple):
    """The way in which a mini-batch runs."""

    computed: list[float]  # seconds of processor time of each worker's thread in each phase
    inline: bool = THREADS
    timed: Manager = NOTHING  # around each phase


class ThreadsOrInline:
    """Chooses threads or one thread for each mini-batch, by the devices of the workers."""

    bounds: ClassVar[Bounds] = Bounds()

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self.times: RunTimes | None = None
        self._gpus = [device for device in devices if device.type == "cuda"]
        self._comparisons: dict[Hashable, RunnerComparison] = {}

    def next(self, kind: Hashable, phases: int, pairs: int, work: float) -> Execution:
        """Return the way of the next mini-batch.

        Args:
            kind: Equal for mini-batches that take about as long.
            pairs: The number of stages times that of micro-batches.
            work: The least number of multiplications of a micro-batch on a stage.
        """
        if self._gpus:  # they compute by themselves, so that the processor's time tells nothing
            pairs = 0
        comparison = self._comparisons.get(kind)
        if comparison is None:
            first = INLINE if pairs and work < self.bounds.heavy else THREADS
            comparison = RunnerComparison(pairs, first, self.bounds)
        record(self._comparisons, kind, comparison, self.bounds.kinds)
        self.times = comparison.times
        inline, computed = comparison.next(), list[float]()
        if inline is None:
            assert comparison.times is not None, "a comparison ends with times"
            return Execution(computed, comparison.times.faster)
        stopwatch = Stopwatch(comparison, inline, phases, self._gpus, computed)
        return Execution(computed, inline, stopwatch)


class RunnerComparison:
    """Runs mini-batches of one kind both ways, until the faster one is known, with its ``times``.

    ``pairs`` is the number of stages times that of micro-batches; 0 where the processor's time does
    not tell how long one thread would take. ``first`` is the way of the first mini-batch.
    """

    def __init__(
        self,
        pairs: int = 0,
        first: bool = THREADS,
        bounds: Bounds = ThreadsOrInline.bounds,
    ) -> None:
        self.times: RunTimes | None = None
        self._pairs = pairs
        self._bounds = bounds
        self._begin(first)

    def _begin(self, first: bool) -> None:
        self._seconds: dict[bool, list[float]] = {THREADS: [], INLINE: []}
        self._first = self._next = first
        self._steady = True  # whether mini-batches on one thread computed all the time
        self._since = 0

    def next(self) -> bool | None:
        """Return the way to measure with the next mini-batch; None if the comparison has ended."""
        if self.times is not None and self._since < self._bounds.again:
            self._since += 1
            return None
        return self._next

    def add(self, inline: bool, seconds: float, computed: float) -> None:
        if self.times is not None and self._since < self._bounds.again:
            return  # it began before the comparison ended
        self._seconds[inline].append(seconds)
        if inline:
            self._steady &= seconds < self._bounds.clear * computed
        if sum(map(len, self._seconds.values())) == 1:  # it has also chosen kernels, and allocated
            large = computed > self._pairs * self._bounds.large
            same = self._pairs > 0 and large is not inline
            self._next = inline if same else not inline
            return
        self._next = not inline
        times = self._times_of_one(inline, seconds, computed) or self._times_of_both()
        if times is not None:
            self.times = times
            self._begin(times.faster)

    def _times_of_one(self, inline: bool, seconds: float, computed: float) -> RunTimes | None:
        """Return the times, if this mini-batch leaves the other way no chance."""
        pairs, bounds = self._pairs, self._bounds
        if not inline and 0 < pairs * bounds.overhead < computed - bounds.clear * seconds:
            return RunTimes(seconds, computed, clear=True)  # one thread would compute for longer
        threads = min(self._seconds[THREADS], default=inf)
        if inline and seconds < min(threads, pairs * bounds.small):
            return RunTimes(threads, seconds, clear=True)
        return None

    def _times_of_both(self) -> RunTimes | None:
        """Return the times of both ways; None if more mini-batches are needed."""
        threads, inline = self._seconds[THREADS], self._seconds[INLINE]
        if not threads or not inline:
            return None
        bounds = self._bounds
        # Other work of the machine makes some mini-batches longer, and none shorter.
        many, one = min(threads), min(inline)
        warm = len(inline) > (self._first is INLINE)
        clear = warm and self._steady and one > bounds.clear * many
        enough = clear or min(len(threads), len(inline)) >= bounds.rounds
        return RunTimes(many, one) if enough else None


@dataclass
class Stopwatch:
    """Measures the time of the phases of one mini-batch."""

    comparison: RunnerComparison
    inline: bool
    phases: int
    gpus: Iterable[torch.device]
    workers: Iterable[float]
    seconds: float = 0.0
    computed: float = 0.0  # by the caller's thread

    def __enter__(self) -> None:
        self.seconds -= perf_counter()
        self.computed -= thread_time()

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            for device in self.gpus:  # their kernels may still run
                torch.cuda.synchronize(device)
            self.phases -= 1
        self.seconds += perf_counter()
        self.computed += thread_time()
        if not self.phases:
            self.comparison.add(self.inline, self.seconds, self.computed + sum(self.workers))
