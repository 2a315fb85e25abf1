from collections.abc import Iterator
from itertools import pairwise
from textwrap import dedent

import pytest

from lightning_gpipe.core.plan.schedule import (
    Action,
    Kind,
    Schedule,
    fill_drain,
    needs,
    simulate,
    successor,
    table,
)

F, R, B = Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD


def small() -> Iterator[tuple[int, int, int, int]]:
    """Yield all small m, n, numbers of workers and numbers of recomputed micro-batches."""
    for m in range(1, 6):
        for n in range(1, 7):
            for workers in (d for d in range(1, n + 1) if n % d == 0):
                for recomputed in range(m + 1):
                    yield m, n, workers, recomputed


def drawn(picture: str) -> str:
    return dedent(picture).lstrip("\n")


def test_fill_drain_without_recomputation() -> None:
    assert table(fill_drain(3, 2)) == drawn("""
        stage 0 | F0 F1 F2 .  .  B2 B1 B0
        stage 1 | .  F0 F1 F2 B2 B1 B0 .
    """)


def test_fill_drain_recomputes_while_it_waits_for_a_gradient() -> None:
    assert table(fill_drain(3, 2, recomputed=3)) == drawn("""
        stage 0 | F0 F1 F2 .  R2 .  B2 R1 B1 R0 B0
        stage 1 | .  F0 F1 F2 R2 B2 R1 B1 R0 B0 .
    """)


def test_fill_drain_recomputes_all_but_the_last() -> None:
    assert table(fill_drain(3, 2, recomputed=2)) == drawn("""
        stage 0 | F0 F1 F2 .  .  B2 R1 B1 R0 B0
        stage 1 | .  F0 F1 F2 B2 R1 B1 R0 B0 .
    """)


def test_fill_drain_looped() -> None:
    assert table(fill_drain(2, 4, workers=2)) == drawn("""
        stage 0 (worker 0) | F0 F1 .  .  .  .  .  .  B1 B0
        stage 1 (worker 1) | .  F0 F1 .  .  .  .  B1 B0 .
        stage 2 (worker 0) | .  .  F0 F1 .  .  B1 B0 .  .
        stage 3 (worker 1) | .  .  .  F0 F1 B1 B0 .  .  .
    """)


def test_one_stage() -> None:
    assert table(fill_drain(3, 1, recomputed=1)) == drawn("""
        stage 0 | F0 F1 F2 B2 B1 R0 B0
    """)


def test_one_micro_batch() -> None:
    assert table(fill_drain(1, 3)) == drawn("""
        stage 0 | F0 .  .  .  .  B0
        stage 1 | .  F0 .  .  B0 .
        stage 2 | .  .  F0 B0 .  .
    """)


def test_numbers_of_two_digits_stay_in_their_columns() -> None:
    assert table(fill_drain(11, 1).forward_half) == drawn("""
        stage 0 | F0  F1  F2  F3  F4  F5  F6  F7  F8  F9  F10
    """)


def test_schedule_prints_as_its_table() -> None:
    assert str(fill_drain(1, 2)) == drawn("""
        stage 0 | F0 .  .  B0
        stage 1 | .  F0 B0 .
    """)


def test_halves_meet_at_the_loss() -> None:
    schedule = fill_drain(2, 2, recomputed=1)

    assert table(schedule.forward_half) == drawn("""
        stage 0 | F0 F1 .
        stage 1 | .  F0 F1
    """)
    assert table(schedule.backward_half) == drawn("""
        stage 0 | .  B1 R0 B0
        stage 1 | B1 R0 B0 .
    """)


def test_interleaved_is_clock_cycle_by_clock_cycle() -> None:
    order = fill_drain(2, 2).interleaved

    assert [f"{action}@{action.j}" for action in order] == [
        *("F0@0", "F1@0", "F0@1", "F1@1"),
        *("B1@1", "B1@0", "B0@1", "B0@0"),
    ]


@pytest.mark.parametrize("n", range(1, 9))
@pytest.mark.parametrize("m", range(1, 9))
def test_bubble_is_that_of_the_paper(m: int, n: int) -> None:
    assert fill_drain(m, n).bubble == pytest.approx((n - 1) / (m + n - 1))


def test_looping_makes_the_bubble_smaller() -> None:
    # Two workers idle for one of 2m + 1 cycles of half the length, instead of one of m + 1.
    assert fill_drain(4, 2).bubble == pytest.approx(1 / 5)
    assert fill_drain(4, 4, workers=2).bubble == pytest.approx(1 / 9)


# The rules of every schedule, for all small sizes.


def test_no_small_schedule_deadlocks() -> None:
    for m, n, workers, recomputed in small():
        simulate(fill_drain(m, n, workers=workers, recomputed=recomputed))


def test_every_action_runs_exactly_once() -> None:
    for m, n, workers, recomputed in small():
        schedule = fill_drain(m, n, workers=workers, recomputed=recomputed)

        ran = [str(action) + f"@{action.j}" for row in schedule.rows for action in row]

        both = [f"{kind}{i}@{j}" for kind in "FB" for i in range(m) for j in range(n)]
        again = [f"R{i}@{j}" for i in range(recomputed) for j in range(n)]
        assert sorted(ran) == sorted(both + again)


def test_every_action_belongs_to_the_worker_of_its_stage() -> None:
    for m, n, workers, recomputed in small():
        schedule = fill_drain(m, n, workers=workers, recomputed=recomputed)

        assert len(schedule.rows) == workers
        for w, row in enumerate(schedule.rows):
            assert {schedule.worker_of(action) for action in row} == {w}


def test_no_action_starts_before_what_it_needs_has_ended() -> None:
    for m, n, workers, recomputed in small():
        start = simulate(fill_drain(m, n, workers=workers, recomputed=recomputed)).start

        for action in start:
            assert all(start[each] + 1 <= start[action] for each in needs(action, m, n))


def test_interleaved_runs_no_action_before_what_it_needs() -> None:
    for m, n, workers, recomputed in small():
        order = fill_drain(m, n, workers=workers, recomputed=recomputed).interleaved

        done: set[Action] = set()
        for action in order:
            assert done.issuperset(needs(action, m, n))
            done.add(action)


def test_interleaved_keeps_each_workers_order() -> None:
    for m, n, workers, recomputed in small():
        schedule = fill_drain(m, n, workers=workers, recomputed=recomputed)

        for w, row in enumerate(schedule.rows):
            assert [a for a in schedule.interleaved if schedule.worker_of(a) == w] == list(row)


def test_recompute_comes_right_before_its_backward() -> None:
    for m, n, workers, recomputed in small():
        for row in fill_drain(m, n, workers=workers, recomputed=recomputed).rows:
            for action, following in pairwise(row):
                if action.kind is R:
                    assert following == Action(B, action.i, action.j)


# What is needed.


def test_turns_are_the_sequence_by_worker() -> None:
    turns = fill_drain(2, 2).forward_half.turns

    assert [(worker, [f"{action}@{action.j}" for action in row]) for worker, row in turns] == [
        (0, ["F0@0", "F1@0"]),
        (1, ["F0@1", "F1@1"]),
    ]


@pytest.mark.parametrize(
    "action, expected",
    [
        (Action(F, 3, 0), Action(F, 3, 1)),
        (Action(B, 3, 1), Action(B, 3, 0)),
        (Action(B, 3, 0), Action(B, 3, -1)),  # the caller
    ],
)
def test_successor(action: Action, expected: Action) -> None:
    assert successor(action) == expected


def test_what_a_forward_needs() -> None:
    assert list(needs(Action(F, 1, 0), m=3, n=2)) == []
    assert list(needs(Action(F, 1, 1), m=3, n=2)) == [Action(F, 1, 0)]


def test_what_a_backward_needs() -> None:
    loss = {Action(F, 0, 1), Action(F, 1, 1)}

    assert set(needs(Action(B, 1, 1), m=2, n=2)) == loss
    assert set(needs(Action(B, 1, 0), m=2, n=2)) == loss | {Action(F, 1, 0), Action(B, 1, 1)}


def test_recompute_needs_no_gradient() -> None:
    needed = set(needs(Action(R, 1, 0), m=2, n=2))

    assert needed == {Action(F, 1, 0), Action(F, 0, 1), Action(F, 1, 1)}


# The simulator.


@pytest.mark.parametrize("m, n", [(1, 1), (4, 1), (4, 3)])
def test_peak_is_one_when_all_are_recomputed(m: int, n: int) -> None:
    assert simulate(fill_drain(m, n, recomputed=m)).peak_live == (1,) * n


@pytest.mark.parametrize("m, n", [(1, 1), (4, 1), (4, 3)])
def test_peak_is_every_micro_batch_when_none_is_recomputed(m: int, n: int) -> None:
    assert simulate(fill_drain(m, n)).peak_live == (m,) * n


def test_peak_of_all_but_the_last_is_one() -> None:
    assert simulate(fill_drain(4, 3, recomputed=3)).peak_live == (1, 1, 1)


def test_peak_counts_each_stage_of_a_worker() -> None:
    assert simulate(fill_drain(4, 4, workers=2)).peak_live == (8, 8)


def test_workers_that_wait_for_each_other() -> None:
    # Worker 0 wants the gradient of micro-batch 0 first, worker 1 makes that of 1 first, which
    # needs a forward that worker 0 has yet to run.
    schedule = Schedule(
        m=2,
        n=2,
        rows=(
            (Action(F, 0, 0), Action(B, 0, 0), Action(F, 1, 0), Action(B, 1, 0)),
            (Action(F, 0, 1), Action(F, 1, 1), Action(B, 1, 1), Action(B, 0, 1)),
        ),
    )

    with pytest.raises(RuntimeError, match="must end") as error:
        simulate(schedule)

    assert "worker 0 at B0" in str(error.value)
    assert "worker 1 at F1" in str(error.value)


def test_costs_that_differ() -> None:
    # Forward costs 1 on stage 0 and 2 on stage 1, backward twice that:
    #
    #   time     0  1  2  3  4  5  6  7  8  9 10 11 12 13 14
    #   stage 0  F0 F1 .  .  .  .  .  .  .  B1 B1 .  .  B0 B0
    #   stage 1  .  F0 F0 F1 F1 B1 B1 B1 B1 B0 B0 B0 B0 .  .
    simulation = simulate(
        fill_drain(2, 2), cost=lambda action: (1 + action.j) * (1 if action.kind is F else 2)
    )

    assert simulation.start == {
        Action(F, 0, 0): 0,
        Action(F, 1, 0): 1,
        Action(B, 1, 0): 9,
        Action(B, 0, 0): 13,
        Action(F, 0, 1): 1,
        Action(F, 1, 1): 3,
        Action(B, 1, 1): 5,
        Action(B, 0, 1): 9,
    }
    assert simulation.makespan == 15
    assert simulation.bubble == pytest.approx(1 - (6 + 12) / 30)


def test_nothing_to_do_has_no_bubble() -> None:
    simulation = simulate(Schedule(m=1, n=1, rows=((),)))

    assert (simulation.makespan, simulation.bubble) == (0, 0)
