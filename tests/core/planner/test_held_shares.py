"""Plans for replicas divide among them as little as fits, and count the bytes that are left."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import nn

from lightning_gpipe import Place, plan
from lightning_gpipe.core.balance import CarriedValue, LayerProfile, LinearCost, ModelProfile
from lightning_gpipe.core.layout import SHARDINGS, ShardingName
from lightning_gpipe.core.planner import NoPlan, Plan, plan_for
from lightning_gpipe.core.planner.predicted_stage import HeldShares, Memory
from lightning_gpipe.core.planner.settings import PlannedSettings
from lightning_gpipe.core.show.plans import alternatives_table, headline

UNIT = 1000  # bytes of the parameters of a layer; of Adam's states twice as many
LAYERS = 8
MINI_BATCH: Any = {"chunks": 4, "activation_checkpointing": "never"}


def profile(layers: int = LAYERS, *, time: float = 1.0, around: int = 0) -> ModelProfile:
    def held(name: str, size: int) -> LayerProfile:
        return LayerProfile(
            name,
            forward=LinearCost(0, time),
            dropping=LinearCost(0, time),
            backward=LinearCost(0, 2 * time),
            saved=LinearCost(0, 1.0),
            parameter_bytes=size,
            gradient_bytes=size,
            optimizer_bytes=2 * size,
        )

    carried = tuple(CarriedValue(k, k + 1, LinearCost(0, 0)) for k in range(layers - 1))
    each = tuple(held(f"layer {k}", UNIT) for k in range(layers))
    return ModelProfile(each, carried, held("around", around), 16, 1, "s", "cpu")


def planned(memory: float, *, schedule: Any = "fill_drain", **options: Any) -> Plan:
    given = {"sharding": SHARDINGS, "replicas": 4, **MINI_BATCH, **options}
    return plan_for(profile(), [Place(memory=memory)] * 2, schedule=schedule, **given)


ACTIVATIONS = 16 * LAYERS / 2  # bytes on each of two devices


@pytest.mark.parametrize(
    "units, sharding, stages",
    [
        (16, None, 2),  # P + G + 2 P, of four layers
        (15, "optimizer", 2),
        (10, "optimizer", 2),  # P + G + 2 P / 4
        (9.5, "parameters", 8),  # with two stages, gradients are whole for a while
        (7, "parameters", 8),  # (P + G + 2 P) / 4, and three quarters more of P + G of two layers
    ],
)
def test_least_that_fits(units: float, sharding: ShardingName | None, stages: int) -> None:
    found = planned(units * UNIT + ACTIVATIONS)

    assert (found.settings.sharding, found.settings.stages) == (sharding, stages)
    assert not any(found.prediction.missing)
    assert found.as_dict()["sharding"] == sharding
    assert (f"sharding={sharding!r}" in str(found)) == (sharding is not None)
    if sharding:
        assert f"sharding={sharding!r}" in headline(found.prediction)


def test_nothing_is_divided_without_replicas() -> None:
    with pytest.raises(NoPlan) as caught:
        planned(15 * UNIT, replicas=1, sharding=(None,))

    assert all(each.settings.sharding is None for each in caught.value.fitting)


def test_gradients_are_divided_where_stages_run_one_after_another() -> None:
    """Of four stages on a device, two have whole gradients at a time, if there is one loss."""
    balance = [1] * LAYERS
    sizes = {
        (sharding, schedule): planned(
            1e9, schedule=schedule, balance=balance, sharding=(sharding,)
        ).prediction.stages
        for sharding in SHARDINGS
        for schedule in ("fill_drain", "1f1b")
    }
    held = {
        key: sum(stage.memory.held for stage in stages if stage.device == 0) / UNIT
        for key, stages in sizes.items()
    }

    assert held == {
        (None, "fill_drain"): 16,
        ("optimizer", "fill_drain"): 4 + 4 + 2,
        ("gradients", "fill_drain"): 4 + 2.5 + 2,
        ("parameters", "fill_drain"): 2.5 + 2.5 + 2,
        (None, "1f1b"): 16,
        ("optimizer", "1f1b"): 4 + 4 + 2,
        ("gradients", "1f1b"): 4 + 4 + 2,
        ("parameters", "1f1b"): 2.5 + 4 + 2,
    }


def test_modules_around_have_whole_parameters_and_gradients() -> None:
    costs = profile(around=100)
    given: Any = {"sharding": ("parameters",), "replicas": 4, **MINI_BATCH}
    with_around, without = (
        plan_for(each, [Place()] * 2, stages=2, balance=[4, 4], **given).prediction.stages[-1]
        for each in (costs, profile())
    )

    assert with_around.memory.held - without.memory.held == 100 + 100 + 200 / 4


def test_time_of_gathers() -> None:
    """Three quarters of each stage come from others: the first at once, others beside actions."""
    balance, given = [1] * LAYERS, {"sharding": ("parameters",)}
    quick = planned(1e9, balance=balance, **given).prediction
    speed = 0.75 * UNIT / 2  # bytes in a unit of time: a stage comes in two units
    slow = plan_for(
        profile(),
        [Place(replica_speed=speed)] * 2,
        balance=balance,
        replicas=4,
        sharding=("parameters",),
        **MINI_BATCH,
    ).prediction

    whole = planned(1e9, balance=balance, sharding=(None,)).prediction
    assert quick.time == whole.time
    # A micro-batch takes 4 in a stage, and what is next comes in 2.
    assert slow.time == quick.time + 2


def test_replicas_that_are_slow_to_reach() -> None:
    room, slow = 7 * UNIT + ACTIVATIONS, UNIT / 1000
    options: Any = {"sharding": SHARDINGS, "replicas": 4, **MINI_BATCH}

    found = plan_for(profile(), [Place(memory=1e9, replica_speed=slow)] * 2, **options)
    forced = plan_for(profile(), [Place(memory=room, replica_speed=slow)] * 2, **options)

    assert found.settings.sharding is None and forced.settings.sharding == "parameters"
    assert forced.prediction.time > 10 * found.prediction.time
    reasons = {x.prediction.settings.sharding: x.reason for x in found.alternatives}
    assert "as fast, and no simpler" in reasons["optimizer"]
    assert "divided" in [column.header for column in alternatives_table(found).columns]


def test_error_names_what_would_fit() -> None:
    with pytest.raises(NoPlan, match=r"2 devices of .* would do, with .*sharding='optimizer'"):
        planned(15 * UNIT + ACTIVATIONS, sharding=(None,))
    with pytest.raises(NoPlan, match=r"2 devices of .* would do, with .*sharding='parameters'"):
        planned(7 * UNIT + ACTIVATIONS, sharding=("optimizer",))


def test_weights_on_the_host_are_the_last_choice() -> None:
    here = planned(7 * UNIT + ACTIVATIONS, weights=("device", "host"))
    there = planned(5 * UNIT + ACTIVATIONS, weights=("device", "host"))

    assert (here.settings.weights, here.settings.sharding) == ("device", "parameters")
    assert (there.settings.weights, there.settings.sharding) == ("host", None)


def test_shares_of_stages_and_around_them() -> None:
    settings = PlannedSettings(2, 4)

    shares = {s: HeldShares.of_stages(settings._replace(sharding=s), 4) for s in SHARDINGS}
    assert list(map(tuple, shares.values())) == [
        (1, 1, 1),
        (1, 1, 0.25),
        (1, 0.25, 0.25),
        (0.25, 0.25, 0.25),
    ]
    assert tuple(HeldShares.of_stages(settings._replace(weights="host"), 4)) == (0, 0, 0)
    assert Memory(8, 8, 16, 1).divided(shares["gradients"]) == Memory(8, 2, 4, 1)


@pytest.mark.parametrize("sharding", [None, *get_args(ShardingName)])
def test_plan_of_a_model(sharding: ShardingName | None) -> None:
    layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
    x = torch.rand(8, 16)
    given: Any = {"chunks": 2, "optimizer": torch.optim.Adam, "balance": [1] * 8}

    found = plan(layers, x, 2, sharding=sharding, replicas=2, **given)

    assert found.settings.sharding == sharding
    json.dumps(found.as_dict())
    assert plan(layers, x, 2, **given).settings.sharding is None


def test_balance_by_memory_counts_shares() -> None:
    """The head's parameters have states, which are divided; those of the layers have none."""
    costs = profile(around=4000)
    assert costs.with_states(0.25).around.held_bytes == 8000 + 2000
    assert costs.with_states(1.0) == costs
    assert replace(costs, layers=()).with_states(0.5).layers == ()
