"""Schedules that are not GPipe's, and placements that are not looped, are data like any other."""

from textwrap import dedent

import pytest

from lightning_gpipe.core.plan.action import Action, Kind
from lightning_gpipe.core.plan.fill_drain import fill_drain
from lightning_gpipe.core.plan.schedule import Loss, Schedule
from tests.support.schedules import one_forward_one_backward, v_shaped


def drawn(picture: str) -> str:
    return dedent(picture).lstrip("\n")


def test_one_forward_one_backward() -> None:
    assert str(one_forward_one_backward(4, 3)) == drawn("""
        stage 0 | F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
        stage 1 | .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
        stage 2 | .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .
    """)


@pytest.mark.parametrize("n", range(1, 6))
@pytest.mark.parametrize("m", range(1, 6))
def test_one_forward_one_backward_holds_no_more_than_the_stages_after_it(m: int, n: int) -> None:
    simulation = one_forward_one_backward(m, n).simulation

    assert simulation.peak_live == tuple(min(m, n - j) for j in range(n))


def test_it_waits_for_ever_where_the_loss_is_that_of_the_mini_batch() -> None:
    schedule = one_forward_one_backward(4, 3)
    whole = Schedule(schedule.m, schedule.placement, schedule.phases, Loss.OF_MINI_BATCH)

    with pytest.raises(RuntimeError, match="worker 2 at B0 on stage 2"):
        whole.simulate()


def test_v_placement() -> None:
    assert str(fill_drain(2, v_shaped(2))) == drawn("""
        stage 0 (worker 0) | F0 F1 .  .  .  .  .  .  .  .  B1 B0
        stage 1 (worker 1) | .  F0 F1 .  .  .  .  .  .  B1 B0 .
        stage 2 (worker 1) | .  .  .  F0 F1 .  .  B1 B0 .  .  .
        stage 3 (worker 0) | .  .  .  .  F0 F1 B1 B0 .  .  .  .
    """)


def test_v_placement_gives_each_stage_to_its_worker() -> None:
    schedule = fill_drain(3, v_shaped(3), recomputed=1)

    owners = [{action.j for action in row} for row in schedule.rows]

    assert owners == [{0, 5}, {1, 4}, {2, 3}]
    assert schedule.recomputed(4) == {0}
    assert Action(Kind.RECOMPUTE, 0, 4) in schedule.rows[1]
