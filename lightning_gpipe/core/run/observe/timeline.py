"""The record of each action of a mini-batch, with its times.

A schedule predicts a bubble; only a record of the real run shows the bubble. Workers record
timestamps, from their threads, which are converted to seconds when the timeline is read. So does
the caller, where its code is a row of the schedule; it is not a worker that could be idle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from lightning_gpipe.core.layout import Layout
from lightning_gpipe.core.run.observe.clocks import Clock, HostClock, Timestamp
from lightning_gpipe.core.schedules import Action, Schedule

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

    Args:
        schedule: The actions to run.
        clocks: The clock of each worker of this process.
        workers: The indices of these workers; None for all of the schedule.
        inline: Whether one thread runs all workers.
        caller: The clock of the caller, if it has a row of the schedule.
        computed: Gets the seconds of processor time that each worker's thread takes in each phase;
            it stays empty where one thread runs all workers.

    Attributes:
        clocks: The clocks, by the index of the worker.
        records: Worker, action, start and end, in the order of the ends. Workers add to them from
            their threads.
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
        self.clocks = dict(zip(indices, clocks, strict=True))
        self._callers = {} if caller is None else {schedule.workers: caller}
        self.records: list[tuple[int, Action, Timestamp, Timestamp]] = []

    def run_by_caller(self, action: Action, run: Callable[..., _T], *args: Any) -> _T:
        """Run an action of the caller, and record it."""
        [(caller, clock)] = self._callers.items()
        start = clock.now()
        result = run(*args)
        self.records.append((caller, action, start, clock.now()))
        return result

    @property
    def spans(self) -> list[Span]:
        """All actions of workers so far, sorted by start; on CUDA, waits for the devices."""
        return self._read(self.clocks)

    @property
    def caller(self) -> list[Span]:
        """The caller's actions without their waits, if it has a row; on CUDA, waits for it."""
        return self._read(self._callers)

    def _read(self, clock_of: Mapping[int, Clock]) -> list[Span]:
        """Return the actions of some workers, or of the caller, sorted by start."""
        records = [record for record in self.records if record[0] in clock_of]
        clocks = {clock.device: clock for clock in clock_of.values()}
        readings = {device: clock.reading() for device, clock in clocks.items()}
        seconds = {w: readings[clock.device] for w, clock in clock_of.items()}
        spans = [Span(w, action, seconds[w](a), seconds[w](b)) for w, action, a, b in records]
        return sorted(spans, key=lambda span: span.start)

    @property
    def lag(self) -> float:
        """The time of the actions divided by the processor time of the workers' threads.

        More than 1.0 where threads wait within an action: for a core, or for the lock of the
        interpreter. 1.0 where that is not known: on GPUs, and where one thread runs all workers.
        """
        on_host = all(isinstance(clock, HostClock) for clock in self.clocks.values())
        computed = sum(self.computed)
        if not computed or not on_host:
            return 1.0
        return sum(span.end - span.start for span in self.spans) / computed

    @property
    def bubble(self) -> float:
        """The share of time in which a worker of this process was idle.

        Counted from the first action of each phase to its last; the caller's time between them, for
        the loss, is not the pipeline's.
        """
        spans = self.spans
        busy = sum(span.end - span.start for span in spans)
        available = len(self.clocks) * length_of(self.schedule, spans)
        return 1.0 - busy / available if available else 0.0

    def __str__(self) -> str:
        lines = [
            f"worker {span.worker}: {span.action} on stage {span.action.j} "
            f"{1e3 * span.start:.3f}..{1e3 * span.end:.3f} ms"
            for span in self.spans
        ]
        return "\n".join(lines)


def length_of(schedule: Schedule, spans: Iterable[Span]) -> float:
    """The time from the first action of each phase to its last, summed over phases."""
    phases: dict[int, list[Span]] = {}
    for span in spans:
        phases.setdefault(schedule.phase_of(span.action), []).append(span)
    return sum(
        max(span.end for span in phase) - min(span.start for span in phase)
        for phase in phases.values()
    )
