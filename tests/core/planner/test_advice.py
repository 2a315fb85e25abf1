"""What other settings would bring, by measured times."""

import pytest

from lightning_gpipe.core.balance import Shift
from lightning_gpipe.core.planner import changes, doubts
from lightning_gpipe.core.schedules import Block, ByMicroBatch, Kind, fill_drain, schedule_for

F, R, B, W = Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD, Kind.WEIGHTS


def test_two_equal_stages() -> None:
    # 4 + 1 forwards of 1 and 4 + 1 backwards of 2: 15 units; with twice as many halves, 13.5.
    times = {(F, 0): 1.0, (F, 1): 1.0, (B, 0): 2.0, (B, 1): 2.0}

    found = {each.setting: each.gain for each in changes(fill_drain(4, (0, 1)), times, [12, 12])}

    assert found["balance='time'"] == 0
    assert found["chunks=8"] == pytest.approx(1 - 13.5 / 15)
    assert found["activation_checkpointing='never'"] == 0


def test_a_stage_that_takes_twice_as_long() -> None:
    times = {(F, 0): 1.0, (F, 1): 2.0, (B, 0): 1.0, (B, 1): 2.0}

    best = changes(fill_drain(4, (0, 1)), times, [8, 16])[0]

    # 1 + 16 + 1 units, and 2 * 5 * 1.5 of even ones.
    assert best.gain == pytest.approx(1 - 15 / 18) and best.at_most
    assert str(best) == "balance='time' would bring up to 17%"


def test_a_balance_by_measured_layers() -> None:
    times = {(F, 0): 1.0, (F, 1): 2.0, (B, 0): 1.0, (B, 1): 2.0}

    def even(busy: object) -> Shift:
        return Shift((2, 4), (3, 3), 16.0, (12.0, 12.0))

    best = changes(fill_drain(4, (0, 1)), times, [8, 16], even)[0]

    assert str(best) == "balance=[3, 3] would bring 17%"


def test_recomputation_that_costs() -> None:
    times = {(F, 0): 1.0, (R, 0): 1.0, (B, 0): 1.0}

    best = changes(fill_drain(2, (0,), recomputed=2), times, [6])[0]

    assert str(best) == ("activation_checkpointing='never' would bring 33%, if the memory suffices")


def test_forwards_that_keep_activations_take_as_long_as_recomputations() -> None:
    """Once 'never' was to bring the whole recomputation, and took longer."""
    times = {(F, 0): 1.0, (R, 0): 3.0, (B, 0): 4.0}

    best = changes(fill_drain(2, (0,), recomputed=2), times, [16])[0]

    assert best.gain == pytest.approx(1 - (3 + 4) / (1 + 3 + 4))


def test_one_thread_overlaps_nothing() -> None:
    """Once a small model on one thread was to gain a third from schedules that took longer."""
    times = {(kind, j): 1.0 for kind in (F, R, B) for j in range(2)}
    schedule = fill_drain(4, (0, 1), recomputed=4)

    found = changes(schedule, times, [12, 12], inline=True)

    assert [each.setting for each in found] == ["activation_checkpointing='never'"]
    assert found[0].gain == pytest.approx(1 - 16 / 24)


def test_small_actions_gain_nothing_by_more_micro_batches() -> None:
    times = {(F, 0): 8e-5, (F, 1): 8e-5, (B, 0): 1e-4, (B, 1): 1e-4}

    found = {each.setting: each.gain for each in changes(fill_drain(4, (0, 1)), times, [1, 1])}

    assert found["chunks=8"] < 0


def test_what_the_simulator_explains() -> None:
    times = {(F, 0): 1.0, (F, 1): 1.0, (B, 0): 2.0, (B, 1): 2.0}
    schedule = fill_drain(4, (0, 1))  # 15 by simulation, 24 on one thread

    assert not doubts(schedule, times, 15.5)
    assert doubts(schedule, times, 17.0) == "its actions explain 15,000.0 of 17,000.0 ms"
    assert doubts(schedule, times, 12.0) == "its actions explain 15,000.0 of 12,000.0 ms"
    assert not doubts(schedule, times, 25.0, inline=True)
    assert doubts(schedule, times, 15.0, inline=True)


def test_actions_that_wait_for_cores() -> None:
    times = {(F, 0): 1.0, (F, 1): 1.0, (B, 0): 2.0, (B, 1): 2.0}

    why = doubts(fill_drain(4, (0, 1)), times, 15.0, lag=2.0)

    assert why.startswith("its actions took 2.0 times as long as their threads computed")


@pytest.mark.parametrize("name", ["1f1b", "zero_bubble", ((0, 7, 8), (1, 2, 9))])
def test_same_schedule_of_other_numbers(name: ByMicroBatch | Block) -> None:
    """What the caller does counts, too: here a loss takes as long as a stage."""
    schedule = schedule_for(name, 4, (0, 1), recomputed=4)
    times = {(kind, j): 1.0 for kind in (F, R, B, W) for j in range(2)}
    times |= {(Kind.PREPARE, -1): 0.0, (Kind.LOSS, 2): 1.0, (B, -1): 0.0}

    found = {each.setting: each.gain for each in changes(schedule, times, [12, 12])}

    def length(m: int, recomputed: int, unit: float) -> float:
        other = schedule_for(name, m, (0, 1), recomputed=recomputed)
        return other.simulate(lambda a: unit * times[a.kind, a.j]).makespan

    now = length(4, 4, 1.0)
    assert found["balance='time'"] == 0
    assert found["chunks=8"] == pytest.approx(1 - length(8, 8, 0.5) / now)
    assert found["activation_checkpointing='never'"] == pytest.approx(1 - length(4, 0, 1.0) / now)
