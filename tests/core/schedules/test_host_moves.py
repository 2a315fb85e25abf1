"""When weights and activations come and leave.

Weights come before each use with those of the next stage, and no others. Activations leave once and
come back once, unless they are needed soon.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpipe.core.schedules import (
    Action,
    Kind,
    Schedule,
    ScheduleName,
    WeightMoves,
    activation_moves,
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


def test_activations_of_three_micro_batches() -> None:
    leaving, coming = activation_moves(fill_drain(3, (0,)).rows[0])

    assert leaving == {Action(Kind.FORWARD, 0, 0), Action(Kind.FORWARD, 1, 0)}
    assert coming == {Action(Kind.BACKWARD, 2, 0): (1, 0), Action(Kind.BACKWARD, 1, 0): (0, 0)}


@given(
    stages=st.integers(1, 6),
    m=st.integers(1, 8),
    recomputed=st.integers(0, 8),
    name=st.sampled_from(["fill_drain", "1f1b", "zero_bubble"]),
)
def test_drawn_rows_of_activations(stages: int, m: int, recomputed: int, name: Any) -> None:
    schedule = schedule_for(name, m, looped(stages, stages), recomputed=min(recomputed, m))
    for row in schedule.rows:
        leaving, coming = activation_moves(row)
        away: set[tuple[int, int]] = set()
        for action in row:
            if action in coming:
                away.remove(coming[action])
            if action.kind is not Kind.FORWARD:
                assert (action.i, action.j) not in away
            if action in leaving:
                away.add((action.i, action.j))
        assert not away
        forwards = [k for k, action in enumerate(row) if action.kind is Kind.FORWARD]
        soon = sum(any(other.i == row[k].i for other in row[k + 1 : k + 3]) for k in forwards)
        assert len(leaving) == m - soon
