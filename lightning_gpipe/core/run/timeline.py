"""What ran when: the record of each action of a mini-batch.

A schedule predicts a bubble; only a record of the real run shows what it was. Workers record
timestamps, from their threads, which are converted to seconds when the timeline is read. So does
the caller, where its code is a row of the schedule; it is no worker that could be idle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from lightning_gpipe.core.plan import Action, Layout, Schedule
from lightning_gpipe.core.run.clocks import Clock, HostClock, Timestamp

_T = TypeVar("_T")


class Span(NamedTuple):
    """One action as it ran; times in seconds of ``time.perf_counter``.

    The number of workers stands for the caller in the place of a worker.
    """

    worker: int
    action: Action
    start: float
    end: float


class Timeline:
    """The record of one mini-batch.

    A worker adds an action to :attr:`records` when it has run, from its thread: its own index, the
    action, and when that began and ended. So does the caller, on its own.

    Args:
        schedule: What is to run.
        clocks: The clock of each worker of this process.
        workers: The indices of these workers; None for all that the schedule has.
        layout: What runs where.
        inline: Whether one thread runs all workers.
        caller: The clock of the caller, if it has a row of the schedule.
        computed: Gets the seconds of processor time that each worker's thread takes in each phase;
            it stays empty where one thread runs all workers.

    Attributes:
        schedule, layout, inline, computed: As given.
        records: What ran, in the order in which it ended.
    """

    def __init__(
        self,
        schedule: Schedule,
        clocks: Sequence[Clock],
        workers: Sequence[int] | None = None,
        layout: Layout | None = None,
        *,
        inline: bool = False,
        caller: Clock | None = None,
        computed: list[float] | None = None,
    ) -> None:
        self.schedule = schedule
        self.computed = [] if computed is None else computed
        self.inline = inline
        self.layout = layout
        indices = range(len(clocks)) if workers is None else workers
        self._clocks = dict(zip(indices, clocks, strict=True))
        self._callers = {} if caller is None else {schedule.workers: caller}
        self.records: list[tuple[int, Action, Timestamp, Timestamp]] = []

    def run_by_caller(self, action: Action, run: Callable[..., _T], *args: Any) -> _T:
        """Run an action of the caller, which is then in the records."""
        [(caller, clock)] = self._callers.items()
        start = clock.now()
        result = run(*args)
        self.records.append((caller, action, start, clock.now()))
        return result

    @property
    def spans(self) -> list[Span]:
        """All actions of workers so far, sorted by start; on CUDA, waits for the devices."""
        return self._read(self._clocks)

    @property
    def caller(self) -> list[Span]:
        """Those of the caller, if it has a row of the schedule; on CUDA, waits for its device.

        What it waits for in an action is no part of that.
        """
        return self._read(self._callers)

    def _read(self, clock_of: Mapping[int, Clock]) -> list[Span]:
        """What was recorded of some workers, or of the caller, sorted by start."""
        records = [each for each in self.records if each[0] in clock_of]
        clocks = {clock.device: clock for clock in clock_of.values()}
        readings = {device: clock.reading() for device, clock in clocks.items()}
        seconds = {w: readings[clock.device] for w, clock in clock_of.items()}
        spans = [Span(w, action, seconds[w](a), seconds[w](b)) for w, action, a, b in records]
        return sorted(spans, key=lambda span: span.start)

    @property
    def lag(self) -> float:
        """How many times as long the actions took as the threads of workers have computed.

        More than one where threads wait in the midst of an action: for a core, or for the lock of
        the interpreter. 1.0 where that is not known: on GPUs, and where one thread runs all.
        """
        on_host = all(isinstance(clock, HostClock) for clock in self._clocks.values())
        computed = sum(self.computed)
        if not computed or not on_host:
            return 1.0
        return sum(span.end - span.start for span in self.spans) / computed

    @property
    def bubble(self) -> float:
        """The share of time in which a worker was idle, between the first action and the last.

        Of several processes, that of this one's workers.

        Counted over each phase that ran; what the caller does between them (the loss) is not the
        pipeline's time.
        """
        phases: dict[int, list[Span]] = {}
        for span in self.spans:
            phases.setdefault(self.schedule.phase_of(span.action), []).append(span)
        busy = sum(span.end - span.start for phase in phases.values() for span in phase)
        available = len(self._clocks) * sum(map(_length, phases.values()))
        return 1.0 - busy / available if available else 0.0

    def __str__(self) -> str:
        lines = [
            f"worker {span.worker}: {span.action} on stage {span.action.j} "
            f"{1e3 * span.start:.3f}..{1e3 * span.end:.3f} ms"
            for span in self.spans
        ]
        return "\n".join(lines)


def _length(spans: Iterable[Span]) -> float:
    spans = list(spans)
    return max(span.end for span in spans) - min(span.start for span in spans)
