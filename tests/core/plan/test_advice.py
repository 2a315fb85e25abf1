"""What other settings would bring, by measured times."""

import pytest

from lightning_gpipe.core.plan import Kind, Shift, changes, fill_drain

F, R, B = Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD


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
