"""What ran when: the record that workers write of each action of a mini-batch.

A schedule promises a bubble; only a record of the real run can tell whether it is kept. On CPU an
action is over when its Python call returns. On CUDA that call only queues kernels, so the worker
queues an event before and after, and the times are read off the events when somebody asks: nothing
waits for the device during a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import torch

from lightning_gpipe.core.plan import Action, Kind, Schedule


class Span(NamedTuple):
    """One action as it ran; times in seconds of ``time.perf_counter``."""

    worker: int
    action: Action
    start: float
    end: float


class Later(Protocol):
    """A moment that is known when somebody asks."""

    def seconds(self) -> float:
        """In seconds of ``time.perf_counter``."""


Stamp = float | Later


class Timeline:
    """The record of one mini-batch.

    Attributes:
        schedule: What was to run.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._records: list[tuple[int, Action, Stamp, Stamp]] = []

    def add(self, worker: int, action: Action, start: Stamp, end: Stamp) -> None:
        """Take down an action; called by workers, from their threads."""
        self._records.append((worker, action, start, end))

    @property
    def spans(self) -> list[Span]:
        """All actions so far, by start; on CUDA, waits for the device."""
        spans = [Span(w, action, _seconds(a), _seconds(b)) for w, action, a, b in self._records]
        return sorted(spans, key=lambda span: span.start)

    @property
    def bubble(self) -> float:
        """The share of time in which a worker was idle, between the first action and the last.

        Counted over the forward half and, once it ran, the backward half; what the caller does
        between them (the loss) is not the pipeline's time.
        """
        halves: list[list[Span]] = [[], []]
        for span in self.spans:
            halves[span.action.kind is not Kind.FORWARD].append(span)
        busy = sum(span.end - span.start for half in halves for span in half)
        available = len(self.schedule.rows) * sum(map(_length, halves))
        return 1.0 - busy / available if available else 0.0

    def __str__(self) -> str:
        lines = [
            f"worker {span.worker}: {span.action} on stage {span.action.j} "
            f"{1e3 * span.start:.3f}..{1e3 * span.end:.3f} ms"
            for span in self.spans
        ]
        return "\n".join(lines)


class HostClock:
    """Time as the host sees it."""

    now: Callable[[], float] = staticmethod(time.perf_counter)  # this moment


class CudaClock:
    """Time as a CUDA stream sees it.

    Events of one stream tell how far apart they are, not when they were. So when somebody asks, the
    stream is waited for, and the times are counted back from then.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def now(self) -> Stamp:
        """The moment at which the stream gets here."""
        return _CudaStamp(self, self._event())

    def seconds_of(self, event: torch.cuda.Event) -> float:
        """When ``event`` was, in seconds of ``time.perf_counter``; waits for the stream."""
        last = self._event()
        last.synchronize()
        return time.perf_counter() - 1e-3 * event.elapsed_time(last)

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event


class _CudaStamp(NamedTuple):
    clock: CudaClock
    event: torch.cuda.Event

    def seconds(self) -> float:
        return self.clock.seconds_of(self.event)


def _seconds(stamp: Stamp) -> float:
    return stamp if isinstance(stamp, float) else stamp.seconds()


def _length(spans: Iterable[Span]) -> float:
    spans = list(spans)
    if not spans:
        return 0.0
    return max(span.end for span in spans) - min(span.start for span in spans)
