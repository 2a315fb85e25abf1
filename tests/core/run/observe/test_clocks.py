from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_gpipe.core.run.observe import clocks
from lightning_gpipe.core.run.observe.clocks import CudaClock, HostClock, clock_of
from lightning_gpipe.core.run.observe.timeline import Timeline
from lightning_gpipe.core.schedules import Action, Kind, fill_drain
from tests.support.placements import one_each
from tests.support.waiting import awaited


def test_host_clock_goes_forward() -> None:
    clock = HostClock()
    first = clock.now()

    assert awaited(lambda: clock.now() > first, True)  # a coarse clock takes its time


def test_seconds_of_the_host_are_its_timestamps() -> None:
    clock = HostClock()
    now = clock.now()

    assert clock.reading()(now) == now


def test_worker_without_a_stream_has_the_host_s_clock() -> None:
    assert isinstance(clock_of(None), HostClock)


class Stream:
    """A CUDA stream on which a millisecond passes between any two events."""

    device = torch.device("cuda", 0)
    events = 0


class Event:
    """An event of such a stream."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: Any) -> None:
        Stream.events += 1
        self.at = Stream.events

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return float(end.at - self.at)


def test_actions_of_a_cuda_stream_do_not_overlap_however_late_the_host_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once each timestamp was counted back from a look at the host's clock of its own."""
    looks: list[float] = []

    def late() -> float:
        looks.append(len(looks) + 0.1 * len(looks) ** 2)
        return looks[-1]

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(clocks, "time", SimpleNamespace(perf_counter=late))
    stream: Any = Stream()
    workers = [CudaClock(stream), CudaClock(stream)]  # of one device
    timeline = Timeline(fill_drain(3, one_each(2)), workers)
    for i in range(3):
        for j in range(2):
            start, end = workers[j].now(), workers[j].now()
            timeline.records.append((j, Action(Kind.FORWARD, i, j), start, end))

    spans = timeline.spans

    assert len(looks) == 1
    assert [1e3 * (span.end - span.start) for span in spans] == pytest.approx([1.0] * 6)
    assert [1e3 * (b.start - a.end) for a, b in pairwise(spans)] == (pytest.approx([1.0] * 5))
