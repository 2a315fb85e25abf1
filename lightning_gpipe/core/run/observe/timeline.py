"""The record of each action of a mini-batch, with its times.

A schedule predicts a bubble; only a record of the real run shows the bubble. Workers record
timestamps, from their threads, which are converted to seconds when the timeline is read. So does
the caller, where its code is a row of the schedule; it is not a worker that could be idle.

A stage is busy while one of its actions runs, and waits while its worker is idle in a phase of the
mini-batch; the caller's time between the phases is not the pipeline's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean, median
from typing import Any, TypeVar

from lightning_gpipe.core.layout import Layout
from lightning_gpipe.core.run.observe.clocks import Clock, Timestamp
from lightning_gpipe.core.schedules import Action, Kind, Schedule, Span

_T = TypeVar("_T")


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
        self._caller = None if caller is None else (schedule.workers, caller)
        self.records: list[tuple[int, Action, Timestamp, Timestamp]] = []

    def run_by_caller(self, action: Action, run: Callable[..., _T], *args: Any) -> _T:
        assert self._caller is not None, "it has a row"
        caller, clock = self._caller
        start = clock.now()
        result = run(*args)
        self.records.append((caller, action, start, clock.now()))
        return result

    @property
    def spans(self) -> list[Span]:
        """All actions of workers so far, sorted by start; on CUDA, waits for the devices.

        Times are in seconds of ``time.perf_counter``.
        """
        return self._read(self.clocks)

    @property
    def caller(self) -> list[Span]:
        """The caller's actions without their waits, if it has a row; on CUDA, waits for it."""
        return [] if self._caller is None else self._read(dict([self._caller]))

    def _read(self, clock_of: Mapping[int, Clock]) -> list[Span]:
        records = [record for record in self.records if record[0] in clock_of]
        clocks = {clock.device: clock for clock in clock_of.values()}
        readings = {device: clock.reading() for device, clock in clocks.items()}
        seconds = {w: readings[clock.device] for w, clock in clock_of.items()}
        spans = [Span(w, action, seconds[w](a), seconds[w](b)) for w, action, a, b in records]
        return sorted(spans, key=lambda span: span.start)

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


def spans_of_all(
    all_of: Callable[[Any], list[Any]], own: Sequence[Span], behind: float
) -> list[Span]:
    """Return all processes' actions by start on the first one's clock; ``own`` are ``behind``."""
    shifted = [x._replace(start=x.start + behind, end=x.end + behind) for x in own]
    return sorted(chain(*all_of(shifted)), key=lambda span: span.start)


def length_of(schedule: Schedule, spans: Iterable[Span]) -> float:
    """Return the time from the first action of each phase to its last, summed over phases."""
    phases: dict[int, list[Span]] = {}
    for span in spans:
        phases.setdefault(schedule.phase_of(span.action), []).append(span)
    return sum(
        max(span.end for span in phase) - min(span.start for span in phase)
        for phase in phases.values()
    )


@dataclass(frozen=True)
class Observation:
    """The times of a mini-batch, in seconds."""

    schedule: Schedule
    length: float  # in which the pipeline ran, forward and backward
    bubble: float  # the share of it in which a worker was idle
    busy: tuple[float, ...]  # of each stage
    waits: tuple[float, ...]  # in which the worker of each stage was idle
    caller: float | None = None  # of its code beside the stages; None without a row

    @classmethod
    def of(cls, timeline: Timeline, spans: Sequence[Span] | None = None) -> Observation | None:
        """Return the times by the spans of all processes; None if there was no backward."""
        schedule, spans = timeline.schedule, timeline.spans if spans is None else spans
        if not any(span.action.kind is Kind.BACKWARD for span in spans):
            return None
        busy = [0.0] * schedule.n
        for span in spans:
            busy[span.action.j] += span.end - span.start
        of_worker = [0.0] * schedule.workers
        for j, worker in enumerate(schedule.placement):
            of_worker[worker] += busy[j]
        length = length_of(schedule, spans)
        return cls(
            schedule,
            length,
            1 - fmean(of_worker) / length,
            tuple(busy),
            tuple(length - of_worker[worker] for worker in schedule.placement),
            sum(x.end - x.start for x in timeline.caller) if schedule.caller else None,
        )

    @property
    def imbalance(self) -> float:
        """The excess of the busiest stage over the mean of all: 0.0 if all are equal."""
        return max(self.busy) / fmean(self.busy) - 1


def typical(observations: Sequence[Observation]) -> list[float]:
    """Return the median over mini-batches of the time in which each stage was busy."""
    return [median(times) for times in zip(*(each.busy for each in observations), strict=True)]
