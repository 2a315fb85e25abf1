"""Placements that are not looped are data like any other."""

from textwrap import dedent

from lightning_gpipe.core.plan.action import Action, Kind
from lightning_gpipe.core.plan.fill_drain import fill_drain
from tests.support.schedules import v_shaped


def drawn(picture: str) -> str:
    return dedent(picture).lstrip("\n")


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
