import pytest

from lightning_gpipe.core.plan.schedule import Action, Kind, fill_drain
from lightning_gpipe.core.run.timeline import HostClock, Timeline
from tests.support.waiting import awaited

F, B = Kind.FORWARD, Kind.BACKWARD


class At(float):
    """A stamp at a known time."""

    def seconds(self) -> float:
        return float(self)


def test_nothing_ran_yet() -> None:
    timeline = Timeline(fill_drain(1, 1))

    assert timeline.spans == []
    assert timeline.bubble == 0


def test_spans_are_sorted_by_their_start() -> None:
    timeline = Timeline(fill_drain(2, 1))
    timeline.add(0, Action(F, 1, 0), At(2), At(3))
    timeline.add(0, Action(F, 0, 0), At(1), At(2))

    assert [(span.action.i, span.start, span.end) for span in timeline.spans] == [
        (0, 1.0, 2.0),
        (1, 2.0, 3.0),
    ]


def test_bubble_of_the_forward_half() -> None:
    timeline = Timeline(fill_drain(2, 2))
    #   worker 0  F0 F1 .
    #   worker 1  .  F0 F1
    for i, j in [(0, 0), (1, 0), (0, 1), (1, 1)]:
        timeline.add(j, Action(F, i, j), At(i + j), At(i + j + 1))

    assert timeline.bubble == pytest.approx(1 / 3)


def test_time_of_the_loss_is_no_bubble() -> None:
    timeline = Timeline(fill_drain(1, 2))
    #   time      0  1       100   102  104
    #   worker 0  F0 .   loss  .    B0
    #   worker 1  .  F0  loss  B0   .
    timeline.add(0, Action(F, 0, 0), At(0), At(1))
    timeline.add(1, Action(F, 0, 1), At(1), At(2))
    timeline.add(1, Action(B, 0, 1), At(100), At(102))
    timeline.add(0, Action(B, 0, 0), At(102), At(104))

    assert timeline.bubble == pytest.approx(1 / 2)


def test_timeline_prints_one_line_per_action() -> None:
    timeline = Timeline(fill_drain(1, 2))
    timeline.add(1, Action(F, 0, 1), At(0.002), At(0.0035))
    timeline.add(0, Action(F, 0, 0), At(0.001), At(0.002))

    assert str(timeline) == (
        "worker 0: F0 on stage 0 1.000..2.000 ms\nworker 1: F0 on stage 1 2.000..3.500 ms"
    )


def test_host_clock_goes_forward() -> None:
    clock = HostClock()
    first = clock.now()

    assert awaited(lambda: clock.now() > first, True)  # a coarse clock takes its time
