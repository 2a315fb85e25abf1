"""What is said if no plan fits: what is missing where, and what would fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from lightning_gpipe.core.balance import ModelProfile, Place
from lightning_gpipe.core.planner import NoPlan, Prediction, plan_for
from tests.core.planner.test_planner import GIB, profile


def refused(costs: ModelProfile, places: list[Place], **given: Any) -> NoPlan:
    with pytest.raises(NoPlan) as caught:
        plan_for(costs, places, **given)
    return caught.value


def fits(found: Sequence[Prediction]) -> Prediction:
    """The last of the plans, which is on more devices where these do not suffice."""
    assert found and not any(any(plan.missing) for plan in found)
    return found[-1]


def test_how_many_devices_would_do() -> None:
    costs = profile(*[1] * 12, held=GIB)

    error = refused(costs, [Place(memory=2.5 * GIB)] * 2)

    assert len(fits(error.fitting).places) == 6
    assert "3.5 GiB on device 0 (stage 0: 6 of 2.5 GiB)" in str(error)
    assert "3.5 GiB on device 1 (stage 1: 6 of 2.5 GiB)" in str(error)
    assert "6 devices of 2.5 GiB would do, with balance=[2, 2, 2, 2, 2, 2], chunks=" in str(error)


@pytest.mark.parametrize("layers", range(3, 9))
def test_one_device_fewer_would_not_do(layers: int) -> None:
    costs = profile(*range(1, layers + 1), saved=3, held=100)
    place = Place(memory=260)

    found = fits(refused(costs, [place]).fitting)

    plan_for(costs, [place] * len(found.places))
    refused(costs, [place] * (len(found.places) - 1))


def test_more_devices_are_like_the_largest() -> None:
    places = [Place(memory=1.5 * GIB), Place(memory=3.5 * GIB)]

    error = refused(profile(*[1] * 7, held=GIB), places)

    assert [place.memory / GIB for place in fits(error.fitting).places] == [1.5, 3.5, 3.5]
    assert "3 devices of 1.5 to 3.5 GiB would do" in str(error)


@pytest.mark.parametrize(
    "given",
    [{"balance": [3, 1]}, {"activation_checkpointing": "never"}, {"stages": 1}, {"chunks": 1}],
)
def test_what_was_given_stands_in_the_way(given: dict[str, Any]) -> None:
    costs = profile(1, 1, 1, 1, saved=10, held=100)
    places = [Place(memory=300)] * 2

    error = refused(costs, places, **given)

    assert len(fits(error.fitting).places) == 2
    assert "2 devices of 2.79e-07 GiB would do, with balance=[2, 2]" in str(error)


def test_layer_that_fits_no_device() -> None:
    error = refused(profile(1, 1, held=3 * GIB), [Place(memory=2 * GIB)])

    assert error.fitting == ()
    assert "No number of devices like these would do" in str(error)


def test_of_many_devices_that_lack_memory_the_worst_are_named() -> None:
    error = refused(profile(*[1] * 100, held=GIB), [Place(memory=GIB / 2)] * 100)

    assert "and less on 96 others" in str(error)
    assert len(str(error)) < 800
