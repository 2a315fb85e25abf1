"""When weights and activations come and leave.

Weights come before each use with those of the next stage, and no others. Activations leave once and
come back once, unless they are needed soon.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpipe.core.schedules import (
    Action,
    Kind,
    Row,
    Schedule,
    ScheduleName,
    activation_moves,
    check_offload_activations,
    fill_drain,
    looped,
    schedule_for,
    weight_moves,
    weight_moves_at_once,
)
from lightning_gpipe.core.schedules.host_moves import WeightMoves, _longest, _Span


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
    row = fill_drain(3, (0,)).rows[0]

    leaving, coming = activation_moves(row, ((0, inf),))
    assert leaving == {Action(Kind.FORWARD, 0, 0), Action(Kind.FORWARD, 1, 0)}
    assert coming == {Action(Kind.BACKWARD, 2, 0): (1, 0), Action(Kind.BACKWARD, 1, 0): (0, 0)}

    leaving, coming = activation_moves(row, ((0, 1),))
    assert leaving == {Action(Kind.FORWARD, 0, 0)}  # which would be held longest
    assert coming == {Action(Kind.BACKWARD, 1, 0): (0, 0)}

    assert activation_moves(row, ((0, 0),)) == (frozenset(), {})


def test_half_of_the_micro_batches_of_1f1b_leave() -> None:
    """The first of four stages holds four: two stay, two leave, in turns."""
    row = schedule_for("1f1b", 12, looped(4, 4), recomputed=0).rows[0]

    leaving, _ = activation_moves(row, ((0, 2),))

    assert [action.i for action in row if action in leaving] == [2, 3, 6, 7, 10, 11]


@given(
    stages=st.integers(1, 6),
    m=st.integers(1, 8),
    recomputed=st.integers(0, 8),
    name=st.sampled_from(["fill_drain", "1f1b", "zero_bubble"]),
    waiting=st.one_of(st.just(inf), st.integers(0, 5)),
)
def test_drawn_rows_of_activations(
    stages: int, m: int, recomputed: int, name: Any, waiting: float
) -> None:
    schedule = schedule_for(name, m, looped(stages, stages), recomputed=min(recomputed, m))
    for j, row in enumerate(schedule.rows):
        leaving, coming = activation_moves(row, ((j, waiting),))
        away: set[tuple[int, int]] = set()
        for action in row:
            if action in coming:
                away.remove(coming[action])
            if action.kind is not Kind.FORWARD:
                assert (action.i, action.j) not in away
            if action in leaving:
                away.add((action.i, action.j))
        assert not away
        spans = spans_of(row)
        soon = {start for start, end in spans if end - start <= 2}
        stays = [span for span in spans if row[span[0]] not in leaving]
        if waiting == inf:
            assert len(leaving) == m - len(soon)
        held = overlap([span for span in stays if span[0] not in soon])
        assert held <= max(0, overlap(spans) - waiting)


@given(
    spans=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=7), k=st.integers(0, 4)
)
def test_as_few_as_possible_leave(spans: list[tuple[int, int]], k: int) -> None:
    """Beside all subsets: none that is smaller lessens the overlap as much."""
    drawn = [_Span(start, start + length) for start, length in dict(spans).items()]
    room = max(0, overlap(drawn) - k)

    leave = list(_longest(drawn, k))

    assert overlap([x for x in drawn if x not in leave]) <= room
    for fewer in combinations(drawn, len(leave) - 1) if leave else ():
        assert overlap([x for x in drawn if x not in fewer]) > room


def test_weights_of_all_stages_at_once() -> None:
    row = fill_drain(2, looped(4, 2)).phase(0).rows[1]

    assert {f"{action}": moves for action, moves in weight_moves_at_once(row).items()} == {
        f"{row[0]}": WeightMoves(loads=(1, 3)),
        f"{row[-1]}": WeightMoves(drops=(1, 3)),
    }
    assert weight_moves_at_once(row[:1]) == {row[0]: WeightMoves((1,), (1,))}
    assert weight_moves_at_once(()) == {}


def spans_of(row: Row) -> list[tuple[int, int]]:
    """The positions of each forward in a row, and of the next action on its micro-batch."""
    computing = [action for action in row if action.kind is not Kind.GRADIENTS]
    return [
        (k, next(n for n in range(k + 1, len(computing)) if computing[n].i == action.i))
        for k, action in enumerate(computing)
        if action.kind is Kind.FORWARD
    ]


def overlap(spans: Sequence[tuple[int, int]]) -> int:
    """The most spans that hold at once, each until its end."""
    return max((sum(a <= at < b for a, b in spans) for at, _ in spans), default=0)


@pytest.mark.parametrize("value", [True, False, [0], [3, 1], (1, 2)])
def test_known_numbers(value: Any) -> None:
    check_offload_activations(value)


@pytest.mark.parametrize("value", [1, None, "host", [], [-1], [True], [1.5], "auto"])
def test_unknown_numbers(value: Any) -> None:
    with pytest.raises(ValueError, match=r"offload_activations must be True, False.*got ") as error:
        check_offload_activations(value)

    assert f"got {value!r}." in str(error.value)


def test_numbers_for_other_stages() -> None:
    with pytest.raises(ValueError, match=r"for each stage: got 2 numbers, \[1, 2\], for 3 stages"):
        check_offload_activations([1, 2], stages=3)
