"""Schedules that are a block: the rows that they stand for, and what is refused.

That any block runs is tested in ``test_rules_of_schedules.py``.
"""

from random import Random
from typing import Any

import pytest

from lightning_gpipe.core.schedules.action import Kind
from lightning_gpipe.core.schedules.placement import folded, looped
from lightning_gpipe.core.schedules.schedule_blocks import as_block, check_block
from lightning_gpipe.core.schedules.table import (
    SCHEDULES,
    ScheduleKind,
    check_by_micro_batch,
    check_planned,
    is_by_micro_batch,
    is_folded,
    schedule_for,
)
from tests.core.schedules.test_rules_of_schedules import PLACEMENTS
from tests.core.schedules.test_table import drawn
from tests.support.blocks import drawn_block
from tests.support.placements import one_each

ONE_FORWARD_ONE_BACKWARD = ((0, 7), (1, 6), (2, 5), (3, 4))
ZERO_BUBBLE = ((0, 7, 8), (1, 5, 9), (2, 3, 10))


def test_one_forward_one_backward() -> None:
    for m in (1, 3, 4, 9):
        for recomputed in (0, 2):
            block, named = (
                schedule_for(each, m, one_each(4), recomputed=recomputed)
                for each in (ONE_FORWARD_ONE_BACKWARD, "1f1b")
            )
            assert block == named
    split = (
        schedule_for(each, 5, one_each(4), split=True)
        for each in (ONE_FORWARD_ONE_BACKWARD, "1f1b")
    )
    assert next(split) == next(split)


def test_zero_bubble() -> None:
    for m in (1, 3, 8):
        assert schedule_for(ZERO_BUBBLE, m, one_each(3)) == schedule_for(
            "zero_bubble", m, one_each(3)
        )


@pytest.mark.parametrize("name", ["v_half", "v_min"])
def test_block_of_the_table(name: str) -> None:
    make = SCHEDULES[name].block
    assert make is not None
    for workers in (1, 3, 8):
        block, placement = make(workers), folded(2 * workers, workers)

        check_by_micro_batch(block, 1, placement)
        assert schedule_for(block, 5, placement, recomputed=2).rows == (
            ScheduleKind(name, True).build(5, placement, 2).rows  # type: ignore[arg-type]  # a name
        )


def test_print() -> None:
    assert str(schedule_for(((0, 7), (1, 4), (2, 3)), 4, one_each(3), recomputed=1)) == drawn("""
        stage 0 | F0 F1 F2 F3 R0 .  B0 .  B1 .  B2 .  B3
        stage 1 | .  F0 F1 R0 .  B0 F2 B1 F3 B2 .  B3 .
        stage 2 | .  .  F0 R0 B0 F1 B1 F2 B2 F3 B3 .  .
        caller  | P0 P1 P2 P3 L0 L1 L2 L3 B0 B1 B2 B3
    """)


def test_only_the_order_of_starts_counts() -> None:
    later = tuple(tuple(start + 5 for start in stage) for stage in ZERO_BUBBLE)

    assert schedule_for(later, 4, one_each(3)) == schedule_for(ZERO_BUBBLE, 4, one_each(3))


def test_kind_of_a_block_builds_it() -> None:
    for split in (False, True):
        block = drawn_block(folded(4, 2), Random(0), split=split)
        kind = ScheduleKind.of(block, split=False)

        assert kind == ScheduleKind(block, split)
        assert kind.build(7, folded(4, 2)) == schedule_for(block, 7, folded(4, 2))
        assert kind.arguments == f"schedule={block!r}"


def test_what_the_package_asks_of_a_block() -> None:
    assert is_by_micro_batch(ZERO_BUBBLE)
    assert ScheduleKind.of(ZERO_BUBBLE, split=False) == (ZERO_BUBBLE, True)
    assert ScheduleKind.of(ONE_FORWARD_ONE_BACKWARD, split=False).split is False
    assert (is_folded(ZERO_BUBBLE, 3), is_folded(ONE_FORWARD_ONE_BACKWARD, 2)) == (False, True)
    with pytest.raises(ValueError, match="is not planned"):
        check_planned(ZERO_BUBBLE)


@pytest.mark.parametrize("placement", sorted(PLACEMENTS))
@pytest.mark.parametrize("split", [False, True])
def test_drawn_blocks_pass_and_end(placement: tuple[int, ...], split: bool) -> None:
    random = Random(len(placement))
    for _ in range(20):
        block = drawn_block(placement, random, split=split)

        check_block(block, 1, placement)
        for m in (1, 2, 7):
            ended = schedule_for(block, m, placement).simulation.end
            assert sum(
                action.kind is Kind.BACKWARD and action.j >= 0 for action in ended
            ) == m * len(placement)


def test_lists_become_tuples() -> None:
    assert as_block([[0, 3], [1, 2]]) == ((0, 3), (1, 2))


@pytest.mark.parametrize(
    "starts", [[], [[]], [[0, 3], [1, 2, 4]], [[0], [1]], [[0, 3.0]], [[0, True]], [0, 3], 7, None]
)
def test_neither_a_name_nor_a_block(starts: Any) -> None:
    with pytest.raises(
        ValueError, match=r"schedule must be a name, or a block: .*Write \[\[0, 3\]"
    ):
        as_block(starts)


@pytest.mark.parametrize(
    "block, placement, message",
    [
        (
            ((0, 3), (1, 2)),
            one_each(3),
            r"got schedule=\(\(0, 3\), \(1, 2\)\) of 2 stages for 3 st",
        ),
        (((0, 3), (0, 2)), one_each(2), "F of stage 1 starts at 0 and F of stage 0 at 0"),
        (((0, 2), (1, 3)), one_each(2), "B of stage 0 starts at 2 and B of stage 1 at 3. Let B of"),
        (((0, 5), (3, 2)), one_each(2), "B of stage 1 starts at 2 and F of stage 1 at 3"),
        (((0, 2, 1),), one_each(1), "W of stage 0 starts at 1 and B of stage 0 at 2"),
        (
            ((0, 4), (1, 2)),
            one_each(2),
            "multiple of 2, .* F of stage 0 starts at 0 and B of stage 0",
        ),
        (
            ((0, 5), (1, 4), (2, 3)) * 2,
            one_each(6),
            "B of stage 2 starts at 3 and B of stage 3 at 5",
        ),
        (((0, 7), (1, 6), (2, 5), (4, 6)), looped(4, 2), "where B of stage 2 starts at 5"),
        (
            ((0, 7), (1, 6), (2, 5), (3, 4)),
            folded(4, 2),
            "multiple of 4.*B of stage 1 starts at 6 and F of stage 2 at 2",
        ),
    ],
)
def test_blocks_that_cannot_run(block: Any, placement: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_by_micro_batch(block, 4, placement)
