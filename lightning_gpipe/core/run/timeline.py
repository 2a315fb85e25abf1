"""What ran when: the record of each action of a mini-batch.

A schedule predicts a bubble; only a record of the real run shows what it was. Workers record
timestamps, from their threads, which are converted to seconds when the timeline is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lightning_gpipe.core.plan import Action, Layout, Schedule
from lightning_gpipe.core.run.clocks import Clock, Timestamp


class Span(NamedTuple):
    """One action as it ran; times in seconds of ``time.perf_counter``."""

    worker: int
    action: Action
    start: float
    end: float


class Timeline:
    """The record of one mini-batch.

    A worker adds an action to :attr:`records` when it has run, from its thread: its own index, the
    action, and when that began and ended.

    Args:
        schedule: What is to run.
        clocks: The clock of each worker of this process.
        workers: The indices of these workers; None for all that the schedule has.
        layout: What runs where.
        inline: Whether one thread runs all workers.

    Attributes:
        schedule, layout, inline: As given.
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
    ) -> None:
        self.schedule = schedule
        self.inline = inline
        self.layout = layout
        indices = range(len(clocks)) if workers is None else workers
        self._clocks = dict(zip(indices, clocks, strict=True))
        self.records: list[tuple[int, Action, Timestamp, Timestamp]] = []

    @property
    def spans(self) -> list[Span]:
        """All actions so far, sorted by start; on CUDA, waits for the devices."""
        records = list(self.records)
        clocks = {clock.device: clock for clock in self._clocks.values()}
        readings = {device: clock.reading() for device, clock in clocks.items()}
        seconds = {w: readings[clock.device] for w, clock in self._clocks.items()}
        spans = [Span(w, action, seconds[w](a), seconds[w](b)) for w, action, a, b in records]
        return sorted(spans, key=lambda span: span.start)

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
