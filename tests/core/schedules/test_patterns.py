"""Rows of workers in brief, written out for any number of micro-batches.

Here are also the tests of ``placement``.
"""

from textwrap import dedent

import pytest

from lightning_gpipe.core.schedules.action import Action, Kind
from lightning_gpipe.core.schedules.placement import folded, looped
from lightning_gpipe.core.schedules.table import fill_drain
from tests.support.placements import one_each


def drawn(picture: str) -> str:
    return dedent(picture).lstrip("\n")


def test_fill_drain_without_recomputation() -> None:
    assert str(fill_drain(3, one_each(2))) == drawn("""
        stage 0 | F0 F1 F2 .  .  B2 B1 B0
        stage 1 | .  F0 F1 F2 B2 B1 B0 .
    """)


def test_fill_drain_recomputes_while_it_waits_for_a_gradient() -> None:
    assert str(fill_drain(3, one_each(2), recomputed=3)) == drawn("""
        stage 0 | F0 F1 F2 .  R2 .  B2 R1 B1 R0 B0
        stage 1 | .  F0 F1 F2 R2 B2 R1 B1 R0 B0 .
    """)


def test_fill_drain_recomputes_all_but_the_last() -> None:
    assert str(fill_drain(3, one_each(2), recomputed=2)) == drawn("""
        stage 0 | F0 F1 F2 .  .  B2 R1 B1 R0 B0
        stage 1 | .  F0 F1 F2 B2 R1 B1 R0 B0 .
    """)


def test_fill_drain_looped() -> None:
    assert str(fill_drain(2, looped(4, 2))) == drawn("""
        stage 0 (worker 0) | F0 F1 .  .  .  .  .  .  B1 B0
        stage 1 (worker 1) | .  F0 F1 .  .  .  .  B1 B0 .
        stage 2 (worker 0) | .  .  F0 F1 .  .  B1 B0 .  .
        stage 3 (worker 1) | .  .  .  F0 F1 B1 B0 .  .  .
    """)


def test_weights_follow_their_backward_and_the_stage_before_waits_no_longer() -> None:
    assert str(fill_drain(3, one_each(2), recomputed=2, split=True)) == drawn("""
        stage 0 | F0 F1 F2 .  .  B2 W2 R1 B1 W1 R0 B0 W0
        stage 1 | .  F0 F1 F2 B2 W2 R1 B1 W1 R0 B0 W0 .
    """)


def test_one_stage() -> None:
    assert str(fill_drain(3, one_each(1), recomputed=1)) == drawn("""
        stage 0 | F0 F1 F2 B2 B1 R0 B0
    """)


def test_one_micro_batch() -> None:
    assert str(fill_drain(1, one_each(3))) == drawn("""
        stage 0 | F0 .  .  .  .  B0
        stage 1 | .  F0 .  .  B0 .
        stage 2 | .  .  F0 B0 .  .
    """)


def test_numbers_of_two_digits_stay_in_their_columns() -> None:
    assert str(fill_drain(11, one_each(1)).phase(0)) == drawn("""
        stage 0 | F0  F1  F2  F3  F4  F5  F6  F7  F8  F9  F10
    """)


def test_halves_meet_at_the_loss() -> None:
    schedule = fill_drain(2, one_each(2), recomputed=1)

    assert str(schedule.phase(0)) == drawn("""
        stage 0 | F0 F1 .
        stage 1 | .  F0 F1
    """)
    assert str(schedule.phase(1)) == drawn("""
        stage 0 | .  B1 R0 B0
        stage 1 | B1 R0 B0 .
    """)


@pytest.mark.parametrize("n", range(1, 9))
@pytest.mark.parametrize("m", range(1, 9))
def test_bubble_is_that_of_the_paper(m: int, n: int) -> None:
    assert fill_drain(m, one_each(n)).bubble == pytest.approx((n - 1) / (m + n - 1))


def test_looping_makes_the_bubble_smaller() -> None:
    # Two workers idle for one of 2m + 1 cycles of half the length, instead of one of m + 1.
    assert fill_drain(4, one_each(2)).bubble == pytest.approx(1 / 5)
    assert fill_drain(4, looped(4, 2)).bubble == pytest.approx(1 / 9)


def test_folded_placement() -> None:
    assert str(fill_drain(2, folded(4, 2))) == drawn("""
        stage 0 (worker 0) | F0 F1 .  .  .  .  .  .  .  .  B1 B0
        stage 1 (worker 1) | .  F0 F1 .  .  .  .  .  .  B1 B0 .
        stage 2 (worker 1) | .  .  .  F0 F1 .  .  B1 B0 .  .  .
        stage 3 (worker 0) | .  .  .  .  F0 F1 B1 B0 .  .  .  .
    """)


def test_folded_placement_gives_each_stage_to_its_worker() -> None:
    schedule = fill_drain(3, folded(6, 3), recomputed=1)

    owners = [{action.j for action in row} for row in schedule.rows]

    assert owners == [{0, 5}, {1, 4}, {2, 3}]
    assert schedule.recomputed(4) == {0}
    assert Action(Kind.RECOMPUTE, 0, 4) in schedule.rows[1]
