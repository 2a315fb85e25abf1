import pytest

from lightning_gpipe.core.plan import Action, Kind, fill_drain, one_each
from lightning_gpipe.core.plan.one_forward_one_backward import one_forward_one_backward
from lightning_gpipe.core.run.clocks import HostClock
from lightning_gpipe.core.run.timeline import Timeline

F, B = Kind.FORWARD, Kind.BACKWARD


def timeline_of(m: int, n: int) -> Timeline:
    return Timeline(fill_drain(m, one_each(n)), [HostClock()] * n)


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
    schedule = one_forward_one_backward(1, 2)
    timeline = Timeline(schedule, [HostClock()] * 2)
    for start, action in enumerate([Action(F, 0, 0), Action(F, 0, 1), Action(B, 0, 1)]):
        timeline.records.append((action.j, action, float(start), start + 1.0))
    timeline.records.append((0, Action(B, 0, 0), 3.0, 4.0))

    assert timeline.bubble == pytest.approx(1 / 2)
