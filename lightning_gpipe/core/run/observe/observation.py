"""A timeline in numbers, stage by stage.

A stage is busy while one of its actions runs. It waits while its worker is idle in a phase of the
mini-batch; the caller's time between the phases is not the pipeline's. The actions of the caller,
where it has a row of the schedule, are counted apart: it is not a stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from lightning_gpipe.core.run.observe.timeline import Span, Timeline, length_of
from lightning_gpipe.core.schedules import Kind, Schedule


@dataclass(frozen=True)
class Observation:
    """The times of a mini-batch, in seconds.

    Attributes:
        schedule: The schedule.
        length: The time in which the pipeline ran, forward and backward.
        bubble: The share of it in which a worker was idle.
        busy: The time in which each stage was busy.
        waits: The time in which the worker of each stage was idle.
        times: The mean time of an action of each kind, on each stage and of the caller.
        caller: The time in which the caller's code ran beside the stages; None if it had no row.
        lag: See :attr:`Timeline.lag`.
        inline: Whether one thread ran all stages.
    """

    schedule: Schedule
    length: float
    bubble: float
    busy: tuple[float, ...]
    waits: tuple[float, ...]
    times: Mapping[tuple[Kind, int], float]
    caller: float | None = None
    lag: float = 1.0
    inline: bool = False

    @classmethod
    def of(cls, timeline: Timeline, spans: Sequence[Span] | None = None) -> Observation | None:
        """Return the times of a mini-batch; None if it had no backward, as in an evaluation.

        Args:
            timeline: The record of this process.
            spans: The actions of all processes, if there are several.
        """
        schedule, spans = timeline.schedule, timeline.spans if spans is None else spans
        if not any(span.action.kind is Kind.BACKWARD for span in spans):
            return None
        by_stage, by_caller = _durations(spans), _durations(timeline.caller)
        busy = [0.0] * schedule.n
        for (_, j), durations in by_stage.items():
            busy[j] += sum(durations)
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
            {key: fmean(durations) for key, durations in (by_stage | by_caller).items()},
            sum(map(sum, by_caller.values())) if schedule.caller else None,
            timeline.lag,
            timeline.inline,
        )

    @property
    def imbalance(self) -> float:
        """The excess of the busiest stage over the mean of all: 0.0 if all are equal."""
        return max(self.busy) / fmean(self.busy) - 1


def typical(observations: Sequence[Observation]) -> list[float]:
    """Return the median over mini-batches of the time in which each stage was busy."""
    return [median(times) for times in zip(*(each.busy for each in observations), strict=True)]


def _durations(spans: Iterable[Span]) -> dict[tuple[Kind, int], list[float]]:
    """The durations of actions, by their kind and stage."""
    durations: dict[tuple[Kind, int], list[float]] = {}
    for _, action, start, end in spans:
        durations.setdefault((action.kind, action.j), []).append(end - start)
    return durations
