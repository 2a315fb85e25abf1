"""Costs of layers are values: they predict other sizes, and can be kept in a file."""

import json

import pytest

from lightning_gpipe.core.balance.profiles import (
    CarriedValue,
    LayerProfile,
    LinearCost,
    ModelProfile,
)


def profile() -> ModelProfile:
    layers = tuple(
        LayerProfile(
            f"layer {k}",
            forward=LinearCost(1.0, 0.5),
            dropping=LinearCost(0.0, 0.5),
            backward=LinearCost(2.0, 1.0),
            saved=LinearCost(0.0, 8.0),
            parameter_bytes=4 * k,
            optimizer_bytes=8 * k,
        )
        for k in range(3)
    )
    carried = (CarriedValue(0, 1, LinearCost(0.0, 16.0)), CarriedValue(0, 2, LinearCost(32.0)))
    return ModelProfile(layers, carried, LayerProfile("around"), 4, 2, "s", "cpu")


def test_cost_through_two_measurements() -> None:
    assert LinearCost.through({8: 10.0, 4: 6.0}) == LinearCost(2.0, 1.0)


@pytest.mark.parametrize(
    "costs, expected",
    [
        ({8: 4.0, 4: 6.0}, LinearCost(4.0, 0.0)),  # more rows never cost less
        ({8: 16.0, 4: 4.0}, LinearCost(0.0, 2.0)),  # no rows never cost less than nothing
        ({8: 16.0}, LinearCost(0.0, 2.0)),
    ],
    ids=str,
)
def test_no_part_of_a_cost_is_negative(costs: dict[int, float], expected: LinearCost) -> None:
    assert LinearCost.through(costs) == expected


def test_profile_survives_json() -> None:
    kept = json.dumps(profile().as_dict())

    assert ModelProfile.from_dict(json.loads(kept)) == profile()
