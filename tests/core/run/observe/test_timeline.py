"""Reported: a timeline records every action, and the bubble."""

from itertools import pairwise
from time import sleep

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe.core.run.observe.clocks import HostClock
from lightning_gpipe.core.run.observe.timeline import Timeline
from lightning_gpipe.core.schedules import (
    Action,
    ByMicroBatch,
    Kind,
    fill_drain,
    schedule_for,
)
from tests.support.pipes import Pipe, with_and_without_threads
from tests.support.placements import one_each

SECONDS = 0.1
F, B = Kind.FORWARD, Kind.BACKWARD


def timeline_of(m: int, n: int) -> Timeline:
    return Timeline(fill_drain(m, one_each(n)), [HostClock()] * n)


class Slow(nn.Linear):
    """Takes some time in forward."""

    def __init__(self) -> None:
        super().__init__(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        sleep(SECONDS)
        return super().forward(x)


def test_nothing_ran_yet() -> None:
    timeline = timeline_of(1, 1)

    assert timeline.spans == []
    assert timeline.bubble == 0


def test_spans_are_sorted_by_their_start() -> None:
    timeline = timeline_of(2, 1)
    timeline.records.append((0, Action(F, 1, 0), 2.0, 3.0))
    timeline.records.append((0, Action(F, 0, 0), 1.0, 2.0))

    assert [(span.action.i, span.start, span.end) for span in timeline.spans] == [
        (0, 1.0, 2.0),
        (1, 2.0, 3.0),
    ]


def test_bubble_of_the_forward_phase() -> None:
    timeline = timeline_of(2, 2)
    #   worker 0  F0 F1 .
    #   worker 1  .  F0 F1
    for i, j in [(0, 0), (1, 0), (0, 1), (1, 1)]:
        timeline.records.append((j, Action(F, i, j), float(i + j), i + j + 1.0))

    assert timeline.bubble == pytest.approx(1 / 3)


def test_time_of_the_loss_is_no_bubble() -> None:
    timeline = timeline_of(1, 2)
    #   time      0  1       100   102  104
    #   worker 0  F0 .   loss  .    B0
    #   worker 1  .  F0  loss  B0   .
    timeline.records.append((0, Action(F, 0, 0), 0.0, 1.0))
    timeline.records.append((1, Action(F, 0, 1), 1.0, 2.0))
    timeline.records.append((1, Action(B, 0, 1), 100.0, 102.0))
    timeline.records.append((0, Action(B, 0, 0), 102.0, 104.0))

    assert timeline.bubble == pytest.approx(1 / 2)


def test_timeline_prints_one_line_per_action() -> None:
    timeline = timeline_of(1, 2)
    timeline.records.append((1, Action(F, 0, 1), 0.002, 0.0035))
    timeline.records.append((0, Action(F, 0, 0), 0.001, 0.002))

    assert str(timeline) == (
        "worker 0: F0 on stage 0 1.000..2.000 ms\nworker 1: F0 on stage 1 2.000..3.500 ms"
    )


def test_bubble_of_one_phase_is_counted_from_its_first_action_to_its_last() -> None:
    schedule = schedule_for("1f1b", 1, one_each(2))
    timeline = Timeline(schedule, [HostClock()] * 2)
    for start, action in enumerate([Action(F, 0, 0), Action(F, 0, 1), Action(B, 0, 1)]):
        timeline.records.append((action.j, action, float(start), start + 1.0))
    timeline.records.append((0, Action(B, 0, 0), 3.0, 4.0))

    assert timeline.bubble == pytest.approx(1 / 2)


def test_caller_is_no_worker() -> None:
    schedule = schedule_for("1f1b", 1, one_each(1))
    timeline = Timeline(schedule, [HostClock()], caller=HostClock())
    #   time      0   10  11  21  22  32
    #   worker 0  .   F0  .   B0  .
    #   caller    P0  .   L0  .   B0
    for start, action in enumerate(schedule.interleaved):
        worker, length = schedule.worker_of(action), 10.0 if action.by_caller else 1.0
        timeline.records.append((worker, action, 11.0 * start, 11.0 * start + length))

    assert [str(span.action) for span in timeline.spans] == ["F0", "B0"]
    assert [(str(span.action), span.worker) for span in timeline.caller] == [
        ("P0", 1),
        ("L0", 1),
        ("B0", 1),
    ]
    assert timeline.bubble == pytest.approx(1 - 2 / 23)


def test_caller_without_a_row() -> None:
    assert timeline_of(1, 1).caller == []


@with_and_without_threads
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_row_of_the_caller(schedule: ByMicroBatch, pipe: Pipe) -> None:
    """It waits for the first stage, which is slow, and that is no part of its actions."""
    pipeline = pipe(nn.Sequential(Slow(), nn.Linear(3, 3)), chunks=3, copy=False)

    pipeline.by_micro_batch(lambda x: pipeline(x).mean(), torch.ones(3, 3), schedule=schedule)

    timeline = pipeline.timeline
    assert timeline is not None
    found = timeline.caller
    assert [span.action for span in found] == list(timeline.schedule.caller)
    assert all(a.end <= b.start for a, b in pairwise(found))
    ended = {span.action: span.end for span in [*timeline.spans, *found]}
    for span in [*timeline.spans, *found]:
        needed = timeline.schedule.needs(span.action)
        assert all(ended[each] <= span.start for each in needed if each in ended)
