"""Predictions of any schedule: times as by the simulation, and as many alive as in the engine.

Here are also the tests of ``predicted_stage`` and ``stage_cost``.
"""

from __future__ import annotations

from random import Random
from typing import Any, get_args

import pytest

from lightning_gpipe.core.balance import CarriedValue, LayerProfile, LinearCost, ModelProfile, Place
from lightning_gpipe.core.planner import Prediction
from lightning_gpipe.core.planner.settings import PlannedSettings
from lightning_gpipe.core.planner.stage_cost import costs_of, sizes_of
from lightning_gpipe.core.schedules import (
    KINDS,
    SCHEDULES,
    Action,
    Kind,
    Schedule,
    ScheduleKind,
    ScheduleName,
    looped,
)
from tests.support.live_activations import peak_live

ROWS = 16


def drawn(random: Random, layers: int) -> ModelProfile:
    """Layers whose costs are small whole numbers, so that sums are exact."""

    def cost() -> LinearCost:
        return LinearCost(random.randint(0, 3), random.randint(1, 5))

    profiles = []
    for k in range(layers):
        saved = cost()
        costs: dict[str, Any] = {
            name: cost() for name in ("forward", "dropping", "backward", "inputs", "weights")
        }
        profiles.append(LayerProfile(f"{k}", **costs, saved=saved, left=saved))
    carried = tuple(CarriedValue(k, k + 1, LinearCost(0, 1)) for k in range(layers - 1))
    return ModelProfile(tuple(profiles), carried, LayerProfile("around"), ROWS, 1, "s", "cpu")


def predicted(
    profile: ModelProfile,
    balance: tuple[int, ...],
    chunks: int,
    recomputed: tuple[int, ...],
    order: ScheduleKind,
    devices: int,
) -> Prediction:
    n = len(balance)
    return Prediction(
        PlannedSettings(n, chunks, recomputed, order, balance),
        profile,
        (Place(),) * n,
        sizes_of(ROWS, chunks),
        "last",
        order.placement(n, devices),
    )


# Those that are planned if none is asked for, in the form of a V, and as blocks.
ORDERS = [
    *KINDS,
    *(
        ScheduleKind.of(name, split=True)
        for name in get_args(ScheduleName)
        if SCHEDULES[name].folded
    ),
    ScheduleKind(((0, 3), (1, 2))),
    ScheduleKind(((0, 8, 9), (1, 6, 7), (2, 4, 6)), split=True),
]
every_order = pytest.mark.parametrize("order", ORDERS, ids=str)


def case(order: ScheduleKind, seed: int) -> tuple[Prediction, Schedule]:
    """A drawn case, and the schedule that the engine would run."""
    random = Random(seed)
    devices = random.randint(1, 4)
    loops = random.randint(1, 2) if order.schedule in ("fill_drain", "1f1b") else 1
    m = devices * random.randint(1, 16 // devices) if loops > 1 else random.randint(1, 8)
    if order.definition.folded:
        loops = 2
    if not isinstance(order.schedule, str):
        devices = len(order.schedule)
    balance = tuple(random.randint(1, 2) for _ in range(devices * loops))
    profile, k = drawn(random, sum(balance)), tuple(random.randint(0, m) for _ in balance)
    found = predicted(profile, balance, m, k, order, devices)
    return found, order.build(m, order.placement(len(balance), devices), k)


@every_order
@pytest.mark.parametrize("seed", range(20))
def test_time_is_that_of_the_simulated_schedule(order: ScheduleKind, seed: int) -> None:
    found, schedule = case(order, seed)
    costs = {
        rows: costs_of(found.profile, found.settings.balance, rows, split=order.split)
        for rows in found.rows
    }

    def cost(action: Action) -> float:
        kind, i, j = action
        if not 0 <= j < schedule.n or kind is Kind.LOSS:
            return 0.0
        each = costs[found.rows[i]][j]
        dropped = i in schedule.recomputed(j)
        times = {
            Kind.FORWARD: each.dropping if dropped else each.forward,
            Kind.RECOMPUTE: each.forward,
            Kind.BACKWARD: each.backward,
            Kind.WEIGHTS: each.weights,
        }
        return times[kind]

    phases = [schedule.phase(k).simulate(cost) for k in range(len(schedule.phases))]
    assert found.time == sum(each.makespan for each in phases)
    assert len(found.spans) == sum(map(len, schedule.rows))


@every_order
@pytest.mark.parametrize("seed", range(20))
def test_memory_at_the_peak_is_the_most_over_time(order: ScheduleKind, seed: int) -> None:
    found, _ = case(order, seed)

    peaks = [max(held for _, held in changes) for changes in found.memory_over_time()]
    for worker, stage in zip(found.placement, found.stages, strict=True):
        assert stage.needed == peaks[worker]
    assert all(changes[-1][1] == changes[0][1] for changes in found.memory_over_time())


@pytest.mark.parametrize("order", KINDS, ids=str)
@pytest.mark.parametrize("seed", range(20))
def test_as_many_micro_batches_are_alive_as_in_the_schedule(order: ScheduleKind, seed: int) -> None:
    """Where what is left for the weights is as large as all that a micro-batch saves."""
    random = Random(seed)
    devices, m = random.randint(1, 4), random.randint(1, 8)
    layer = LayerProfile(
        "", saved=LinearCost(1), left=LinearCost(1), inputs=LinearCost(), weights=LinearCost()
    )
    profile = ModelProfile((layer,) * devices, (), LayerProfile(""), ROWS, 1, "s", "cpu")
    k = tuple(random.randint(0, m) for _ in range(devices))

    found = predicted(profile, (1,) * devices, m, k, order, devices)

    live = peak_live(order.build(m, looped(devices, devices), k))
    assert tuple(stage.memory.activations for stage in found.stages) == live


def test_live_micro_batches_of_1f1b_do_not_depend_on_their_number() -> None:
    profile = drawn(Random(0), 4)
    saved = [layer.saved.at(1) for layer in profile.layers]

    found = predicted(profile, (1, 1, 1, 1), 16, (0,) * 4, ScheduleKind("1f1b"), 4)

    assert [stage.memory.activations for stage in found.stages] == [
        (4 - j) * each for j, each in enumerate(saved)
    ]


def test_outputs_of_all_micro_batches_or_of_one() -> None:
    profile = drawn(Random(0), 2)
    with_output = ModelProfile(
        profile.layers, profile.carried, profile.around, ROWS, 1, "s", "cpu", LinearCost(0, 10)
    )

    def outputs(order: ScheduleKind) -> list[float]:
        stages = predicted(with_output, (1, 1), 4, (0, 0), order, 2).stages
        return [stage.memory.outputs for stage in stages]

    assert outputs(ScheduleKind()) == [0, 10 * ROWS]
    assert outputs(ScheduleKind("1f1b")) == [0, 10 * ROWS / 4]


def test_backward_for_which_nobody_waits_is_not_split() -> None:
    first = LayerProfile(
        "", backward=LinearCost(4), inputs=LinearCost(4), weights=LinearCost(), waited=False
    )
    other = LayerProfile("", backward=LinearCost(4), inputs=LinearCost(2), weights=LinearCost(3))
    profile = ModelProfile((first, other, other), (), first, ROWS, 1, "s", "cpu")

    costs = costs_of(profile, (2, 1), 1, split=True)

    assert [(each.backward, each.weights) for each in costs] == [(8, 0), (2, 3)]


def test_backwards_that_were_not_measured_in_two_parts() -> None:
    layer = LayerProfile("", backward=LinearCost(4))
    profile = ModelProfile((layer,), (), layer, ROWS, 1, "s", "cpu")

    with pytest.raises(ValueError, match=r"split_backward=True"):
        _ = predicted(profile, (1,), 2, (0,), ScheduleKind(split=True), 1).time


def test_stages_of_one_device_share_its_memory() -> None:
    layer = LayerProfile("", saved=LinearCost(1), parameter_bytes=10)
    profile = ModelProfile((layer,) * 4, (), LayerProfile(""), ROWS, 1, "s", "cpu")

    found = predicted(profile, (1, 1, 1, 1), 2, (0,) * 4, ScheduleKind(), 2)

    assert [stage.memory.total for stage in found.stages] == [12] * 4
    assert [stage.needed for stage in found.stages] == [24] * 4
    assert found.workers == [0, 1]
