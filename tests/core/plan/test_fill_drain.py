from collections.abc import Iterator
from itertools import pairwise
from textwrap import dedent

import pytest

from lightning_gpipe.core.plan.action import Action, Kind
from lightning_gpipe.core.plan.fill_drain import fill_drain
from lightning_gpipe.core.plan.layout import looped, one_each

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


# The rules of every schedule, for all small sizes.


def test_no_small_schedule_deadlocks() -> None:
    for m, n, workers, recomputed in small():
        fill_drain(m, looped(n, workers), recomputed=recomputed).simulate()


def test_every_action_runs_exactly_once() -> None:
    for m, n, workers, recomputed in small():
        schedule = fill_drain(m, looped(n, workers), recomputed=recomputed)

        ran = [str(action) + f"@{action.j}" for row in schedule.rows for action in row]

        both = [f"{kind}{i}@{j}" for kind in "FB" for i in range(m) for j in range(n)]
        again = [f"R{i}@{j}" for i in range(recomputed) for j in range(n)]
        assert sorted(ran) == sorted(both + again)


def test_every_action_belongs_to_the_worker_of_its_stage() -> None:
    for m, n, workers, recomputed in small():
        schedule = fill_drain(m, looped(n, workers), recomputed=recomputed)

        assert len(schedule.rows) == workers
        for w, row in enumerate(schedule.rows):
            assert {schedule.placement[action.j] for action in row} == {w}


def test_no_action_starts_before_what_it_needs_has_ended() -> None:
    for m, n, workers, recomputed in small():
        schedule = fill_drain(m, looped(n, workers), recomputed=recomputed)
        start = schedule.simulate().start

        for action in start:
            needed = [each for each in schedule.needs(action) if each in start]
            assert all(start[each] + 1 <= start[action] for each in needed)


def test_interleaved_runs_no_action_before_what_it_needs() -> None:
    for m, n, workers, recomputed in small():
        schedule = fill_drain(m, looped(n, workers), recomputed=recomputed)

        done: set[Action] = set()
        for action in schedule.interleaved:
            assert done.issuperset(set(schedule.needs(action)) & set(schedule.interleaved))
            done.add(action)


def test_interleaved_keeps_each_workers_order() -> None:
    for m, n, workers, recomputed in small():
        schedule = fill_drain(m, looped(n, workers), recomputed=recomputed)

        for w, row in enumerate(schedule.rows):
            assert [a for a in schedule.interleaved if schedule.placement[a.j] == w] == list(row)


def test_recompute_comes_right_before_its_backward() -> None:
    for m, n, workers, recomputed in small():
        for row in fill_drain(m, looped(n, workers), recomputed=recomputed).rows:
            for action, following in pairwise(row):
                if action.kind is R:
                    assert following == Action(B, action.i, action.j)
