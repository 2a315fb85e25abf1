"""When weights come and leave: before each use, with those of the next stage, and no others."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpipe.core.schedules import (
    Action,
    Kind,
    Schedule,
    ScheduleName,
    WeightMoves,
    fill_drain,
    looped,
    schedule_for,
    weight_moves,
)


def in_one_row(schedule: Schedule, worker: int = 0) -> list[tuple[Action, WeightMoves]]:
    moves = weight_moves(schedule.rows[worker])
    return [(action, moves.get(action, WeightMoves())) for action in schedule.rows[worker]]


def test_three_stages_of_one_device() -> None:
    moves = weight_moves(fill_drain(1, (0, 0, 0)).rows[0])

    assert moves == {
        Action(Kind.FORWARD, 0, 0): WeightMoves((0, 1), (0,)),
        Action(Kind.FORWARD, 0, 1): WeightMoves((2,)),
        Action(Kind.BACKWARD, 0, 2): WeightMoves((), (2,)),
        Action(Kind.BACKWARD, 0, 1): WeightMoves((0,), (1,)),
        Action(Kind.BACKWARD, 0, 0): WeightMoves((), (0,)),
    }


def test_only_stage_of_a_device_comes_once() -> None:
    moves = weight_moves(schedule_for("1f1b", 4, (0, 1, 2)).rows[1])

    assert list(moves.values()) == [WeightMoves((1,)), WeightMoves((), (1,))]


@given(
    stages=st.integers(1, 9),
    workers=st.integers(1, 3),
    m=st.integers(1, 5),
    recomputed=st.integers(0, 5),
    split=st.booleans(),
    gradients=st.booleans(),
)
def test_drawn_rows(
    stages: int, workers: int, m: int, recomputed: int, split: bool, gradients: bool
) -> None:
    workers = min(stages, workers)
    schedule = fill_drain(m, looped(stages, workers), recomputed=min(recomputed, m), split=split)
    schedule = schedule.with_gradients if gradients else schedule
    for worker in range(workers):
        here: set[int] = set()
        loads: Counter[int] = Counter()
        for action, moves in in_one_row(schedule, worker):
            assert not here.intersection(moves.loads)
            here.update(moves.loads)
            loads.update(moves.loads)
            assert len(here) <= 2
            assert action.j in here or action.kind is Kind.GRADIENTS
            here.difference_update(moves.drops)
        assert not here
        own = [j for j in range(stages) if j % workers == worker]
        assert loads == {j: 1 if j in own[-2:] else 2 for j in own}


@pytest.mark.parametrize(
    "name, placement", [("1f1b", (0, 1, 0, 1)), ("zero_bubble_v", (0, 1, 1, 0))]
)
def test_two_stages_of_a_device_stay(name: ScheduleName, placement: tuple[int, ...]) -> None:
    schedule = schedule_for(name, 4, placement)
    for worker in range(2):
        loads = Counter(j for _, moves in in_one_row(schedule, worker) for j in moves.loads)
        assert set(loads.values()) == {1}
