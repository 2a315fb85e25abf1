"""The prediction of ``benchmarks.host_weights`` is the schedule's, where weights take no time."""

from __future__ import annotations

import pytest

from benchmarks.host_weights import DEVICES, played, waiting
from lightning_gpipe.core.schedules import Kind, fill_drain, looped

COST = {Kind.FORWARD: 1.0, Kind.RECOMPUTE: 1.0, Kind.BACKWARD: 2.0}


@pytest.mark.parametrize("stages, workers, m", [(1, 1, 1), (4, 2, 3), (6, 3, 5), (8, 8, 2)])
def test_weights_that_take_no_time(stages: int, workers: int, m: int) -> None:
    schedule = fill_drain(m, looped(stages, workers), recomputed=m)

    assert played(schedule, COST, 0.0) == schedule.simulate(lambda a: COST[a.kind]).makespan


def test_one_device_by_hand() -> None:
    schedule = fill_drain(1, (0, 0, 0), recomputed=1)

    # What is computed hides all transfers but the first weights and the last gradients.
    assert played(schedule, COST, 0.5) == 0.5 + 12 + 0.5
    # The weights of three stages come, the last stage computes, and the gradients of three go.
    assert played(schedule, COST, 10.0) == 3 * 10 + 4 + 3 * 10


def test_shares_fall_with_micro_batches() -> None:
    for device in DEVICES.values():
        shares = [waiting(device, 7, 1, m, 2048) for m in (1, 4, 16)]
        assert sorted(shares, reverse=True) == shares
        assert 0 <= shares[-1] < 0.01
