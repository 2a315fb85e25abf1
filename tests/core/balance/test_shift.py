"""Another balance, by measured times of the stages."""

import pytest

from lightning_gpipe.core.balance import LayerCosts, Place, Shift, shift_for

PLACES = [Place(), Place()]


def test_a_slow_device_gets_fewer_layers() -> None:
    # Six layers of a second; the second device has become half as fast.
    shift = shift_for(LayerCosts([1.0] * 6), [3, 3], [3.0, 6.0], (0, 1), PLACES)

    assert shift == Shift((3, 3), (4, 2), measured=6.0, stages=(4.0, 4.0))
    assert shift.gain == pytest.approx(1 / 3)
    assert shift.moved == 1


def test_stages_that_take_what_their_layers_do_stay() -> None:
    shift = shift_for(LayerCosts([1.0] * 6), [3, 3], [3e-3, 3e-3], (0, 1), PLACES)

    assert (shift.after, shift.gain, shift.moved) == ((3, 3), 0.0, 0)


def test_stages_of_one_device_are_equally_slow() -> None:
    # Stages 0 and 2 are on device 0, which takes twice as long for each of its four layers.
    shift = shift_for(
        LayerCosts([1.0] * 8), [2, 2, 2, 2], [4.0, 2.0, 4.0, 2.0], (0, 1, 0, 1), [Place()] * 4
    )

    assert (shift.after, shift.predicted) == ((1, 3, 1, 3), 3.0)


def test_a_stage_whose_layers_cost_nothing() -> None:
    shift = shift_for(LayerCosts([1.0, 1.0, 0.0]), [2, 1], [2.0, 0.0], (0, 1), PLACES)

    assert shift.after[0] == 1


def test_limits_of_memory_hold() -> None:
    costs = LayerCosts([1.0] * 4, [1.0] * 4)
    places = [Place(memory=2), Place(memory=3)]

    assert shift_for(costs, [2, 2], [2.0, 8.0], (0, 1), places).after == (2, 2)
