import pytest

from lightning_gpipe.core.schedules.action import Action, Kind
from lightning_gpipe.core.schedules.placement import looped
from lightning_gpipe.core.schedules.schedule import Schedule
from lightning_gpipe.core.schedules.table import fill_drain
from tests.support.live_activations import peak_live
from tests.support.placements import one_each

F, R, B = Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD
W, L = Kind.WEIGHTS, Kind.LOSS


@pytest.mark.parametrize("m, n", [(1, 1), (4, 1), (4, 3)])
def test_peak_is_one_when_all_are_recomputed(m: int, n: int) -> None:
    assert peak_live(fill_drain(m, one_each(n), recomputed=m)) == (1,) * n


@pytest.mark.parametrize("m, n", [(1, 1), (4, 1), (4, 3)])
def test_peak_is_every_micro_batch_when_none_is_recomputed(m: int, n: int) -> None:
    assert peak_live(fill_drain(m, one_each(n))) == (m,) * n


def test_peak_of_all_but_the_last_is_one() -> None:
    assert peak_live(fill_drain(4, one_each(3), recomputed=3)) == (1, 1, 1)


def test_peak_counts_each_stage_of_a_worker() -> None:
    assert peak_live(fill_drain(4, looped(4, 2))) == (8, 8)


def test_activations_live_until_the_gradients_of_the_weights_are_computed() -> None:
    row = (Action(F, 0, 0), Action(B, 0, 0), Action(F, 1, 0), Action(B, 1, 0))
    late = (*row, Action(W, 0, 0), Action(W, 1, 0))

    assert peak_live(Schedule(2, (0,), ((row,),))) == (1,)
    assert peak_live(Schedule(2, (0,), ((late,),))) == (2,)


def test_caller_takes_time_and_is_no_worker_that_could_be_idle() -> None:
    # One stage, F and B of 1 each, and the caller takes 2 for each loss:
    #
    #   time     0  1  2  3  4  5
    #   stage 0  F0 F1 .  B0 .  B1
    #   caller   .  L0 L0 L1 L1 .
    rows = ((Action(F, 0, 0), Action(F, 1, 0), Action(B, 0, 0), Action(B, 1, 0)),)
    schedule = Schedule(2, (0,), (rows,), caller=(Action(L, 0, 1), Action(L, 1, 1)))

    simulation = schedule.simulate(lambda action: 2.0 if action.kind is L else 1.0)

    assert simulation.start[Action(L, 1, 1)] == 3
    assert simulation.makespan == 6
    assert simulation.bubble == pytest.approx(1 - 4 / 6)
    assert schedule.bubble == 0


def test_caller_that_waits_for_ever() -> None:
    rows = ((Action(F, 0, 0), Action(B, 0, 0), Action(F, 1, 0), Action(B, 1, 0)),)
    schedule = Schedule(2, (0,), (rows,), caller=(Action(L, 1, 1), Action(L, 0, 1)))

    with pytest.raises(RuntimeError, match="worker 0 at B0 on stage 0, the caller at L1"):
        schedule.simulate()


def test_workers_that_wait_for_each_other() -> None:
    # Worker 0 wants the gradient of micro-batch 0 first, worker 1 makes that of 1 first, which
    # needs a forward that worker 0 has yet to run.
    rows = (
        (Action(F, 0, 0), Action(B, 0, 0), Action(F, 1, 0), Action(B, 1, 0)),
        (Action(F, 0, 1), Action(F, 1, 1), Action(B, 1, 1), Action(B, 0, 1)),
    )

    with pytest.raises(RuntimeError, match="must end") as error:
        Schedule(2, (0, 1), (rows,)).simulate()

    assert "worker 0 at B0" in str(error.value)
    assert "worker 1 at F1" in str(error.value)


def test_costs_that_differ() -> None:
    # Forward costs 1 on stage 0 and 2 on stage 1, backward twice that:
    #
    #   time     0  1  2  3  4  5  6  7  8  9 10 11 12 13 14
    #   stage 0  F0 F1 .  .  .  .  .  .  .  B1 B1 .  .  B0 B0
    #   stage 1  .  F0 F0 F1 F1 B1 B1 B1 B1 B0 B0 B0 B0 .  .
    def cost(action: Action) -> float:
        return (1 + action.j) * (1 if action.kind is F else 2)

    simulation = fill_drain(2, one_each(2)).simulate(cost)

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
    simulation = Schedule(1, (0,), (((),),)).simulate()

    assert (simulation.makespan, simulation.bubble) == (0, 0)
