"""What a mini-batch took, stage by stage: a timeline in numbers.

A stage is at work while one of its actions runs. It waits while its worker does nothing in a phase
of the mini-batch; what the caller does between the phases is not the pipeline's time. What it does
meanwhile, where it has a row of the schedule, is counted apart: it is no stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from lightning_gpipe.core.plan import Kind, Schedule
from lightning_gpipe.core.run.timeline import Span, Timeline


@dataclass(frozen=True)
class Observation:
    """What a mini-batch took; times in seconds.

    Attributes:
        schedule: What ran.
        length: The time in which the pipeline ran, forward and backward.
        bubble: The share of it in which a worker was idle.
        busy: The time in which each stage was at work.
        waits: The time in which the worker of each stage was idle.
        times: The mean time of an action of each kind, on each stage and of the caller.
        caller: The time in which the caller's code ran beside the stages; None if it had no row.
        lag: How many times as long actions took as their threads computed, see :class:`Timeline`.
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
        """What a mini-batch took; None if it has had no backward, as in an evaluation.

        Args:
            timeline: What ran when in this process.
            spans: The actions of all processes, if there are several.
        """
        schedule, spans = timeline.schedule, timeline.spans if spans is None else spans
        if not any(span.action.kind is Kind.BACKWARD for span in spans):
            return None
        taken, by_caller = _taken(spans), _taken(timeline.caller)
        busy = [0.0] * schedule.n
        for (_, j), each in taken.items():
            busy[j] += sum(each)
        of_worker = [0.0] * schedule.workers
        for j, worker in enumerate(schedule.placement):
            of_worker[worker] += busy[j]
        length = _length(schedule, spans)
        return cls(
            schedule,
            length,
            1 - fmean(of_worker) / length,
            tuple(busy),
            tuple(length - of_worker[worker] for worker in schedule.placement),
            {key: fmean(each) for key, each in (taken | by_caller).items()},
            sum(map(sum, by_caller.values())) if schedule.caller else None,
            timeline.lag,
            timeline.inline,
        )

    @property
    def imbalance(self) -> float:
        """How much longer the busiest stage works than the mean of all: 0.0 if all are equal."""
        return max(self.busy) / fmean(self.busy) - 1


def typical(observations: Sequence[Observation]) -> list[float]:
    """The median of the time in which each stage was at work, over several mini-batches."""
    return [median(times) for times in zip(*(each.busy for each in observations), strict=True)]


def _taken(spans: Iterable[Span]) -> dict[tuple[Kind, int], list[float]]:
    """How long each action took, by its kind and stage."""
    taken: dict[tuple[Kind, int], list[float]] = {}
    for _, action, start, end in spans:
        taken.setdefault((action.kind, action.j), []).append(end - start)
    return taken


def _length(schedule: Schedule, spans: Sequence[Span]) -> float:
    """The time from the first action of each phase to its last, in sum."""
    phases: dict[int, list[Span]] = {}
    for span in spans:
        phases.setdefault(schedule.phase_of(span.action), []).append(span)
    return sum(
        max(span.end for span in phase) - min(span.start for span in phase)
        for phase in phases.values()
    )
