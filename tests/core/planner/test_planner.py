"""Plans: the fastest of those that fit.

Here are also the tests of ``search`` and ``bounds``.
"""

import json
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any

import pytest

from lightning_gpipe.core.balance import CarriedValue, LayerProfile, LinearCost, ModelProfile, Place
from lightning_gpipe.core.planner import NoPlan, Prediction, plan_for
from lightning_gpipe.core.planner.action_costs import most_alive
from lightning_gpipe.core.planner.predicted_stage import Memory
from lightning_gpipe.core.planner.settings import PlannedSettings
from lightning_gpipe.core.planner.stage_cost import sizes_of
from lightning_gpipe.core.schedules import (
    FILL_DRAIN,
    KINDS,
    SCHEDULES,
    Action,
    ActivationCheckpointing,
    Kind,
    ScheduleKind,
    recomputed_by_stage,
)

GIB = 2**30


def profile(*times: float, saved: float = 0, held: int = 0, fixed: float = 0) -> ModelProfile:
    """Layers that take so long for each row, forward, and twice that backward."""
    layers = tuple(
        LayerProfile(
            f"layer {k}",
            forward=LinearCost(fixed, time),
            dropping=LinearCost(fixed, time),
            backward=LinearCost(2 * fixed, 2 * time),
            saved=LinearCost(0, saved),
            inputs=LinearCost(fixed, time),
            weights=LinearCost(1.1 * fixed, 1.1 * time),
            left=LinearCost(0, 0.6 * saved),
            parameters=held // 4,
            parameter_bytes=held,
        )
        for k, time in enumerate(times)
    )
    carried = tuple(CarriedValue(k, k + 1, LinearCost(0, 1)) for k in range(len(times) - 1))
    return ModelProfile(layers, carried, LayerProfile("around"), 16, 1, "s", "cpu")


def predict(
    costs: ModelProfile,
    balance: tuple[int, ...],
    chunks: int,
    recomputed: ActivationCheckpointing,
    order: ScheduleKind = FILL_DRAIN,
) -> Prediction:
    n = len(balance)
    return Prediction(
        PlannedSettings(n, chunks, recomputed_by_stage(recomputed, chunks, n), order, balance),
        costs,
        (Place(),) * n,
        sizes_of(16, chunks),
        "last",
        tuple(range(n)),
    )


def test_time_is_that_of_the_schedule() -> None:
    # F0 F1 .  .  . . B1B1B0B0
    # .  F0 F1 B1B1B0B0
    found = predict(profile(1, 1), (1, 1), chunks=2, recomputed=0)

    assert found.time == 8 * 3 + 16 * 3
    assert found.bubble == pytest.approx(1 / 3)
    assert [stage.time for stage in found.stages] == [48, 48]
    assert found.throughput == 16 / 72


def test_recomputation_takes_a_forward_more() -> None:
    found = predict(profile(1, 1), (2,), chunks=2, recomputed=1)

    assert found.time == 2 * 16 * 3 + 2 * 8
    assert found.settings.activation_checkpointing == 1


def test_micro_batches_of_different_sizes_take_their_own_time() -> None:
    assert sizes_of(10, 4) == (3, 3, 2, 2)
    assert sizes_of(2, 4) == (1, 1)
    found = replace(predict(profile(1), (1,), chunks=4, recomputed=0), rows=sizes_of(10, 4))

    assert found.time == 30
    assert found.spans[0].end == 3
    assert found.spans[-1].action == Action(Kind.BACKWARD, 0, 0)


@pytest.mark.parametrize("recomputed", [0, 1, 3, 4])
def test_memory_at_the_peak_is_the_most_over_time(recomputed: int) -> None:
    found = predict(profile(1, 1, saved=10, held=100), (1, 1), chunks=4, recomputed=recomputed)

    for stage, over_time in zip(found.stages, found.memory_over_time(), strict=True):
        assert max(held for _, held in over_time) == stage.memory.total
        assert over_time[0] == (0, 100)
        assert over_time[-1][1] == 100


def test_memory_by_kind() -> None:
    first, last = predict(profile(1, 1, saved=10, held=100), (1, 1), 4, recomputed=3).stages

    assert first.memory == Memory(100, 0, 0, 0, 10 * 4, 0)
    assert last.memory == Memory(100, 0, 0, 0, 10 * 4, 16)
    assert (first.sent, last.sent) == (16, 0)


@pytest.mark.parametrize(
    "schedule, split, room",
    [*(("fill_drain", False, room) for room in (0, 60, 1000)), ("auto", None, 60)],
)
def test_fastest_of_all_is_found(schedule: Any, split: bool | None, room: int) -> None:
    costs = profile(3, 1, 2, 2, saved=7, held=50, fixed=0.7)
    places = [Place(memory=size + room) for size in (320, 340, 300)]

    best = plan_for(costs, places, most=4, schedule=schedule, split_backward=split).prediction

    fitting = []
    orders = KINDS if schedule == "auto" else (FILL_DRAIN,)
    for order, n, m in product(orders, (1, 2, 3), (1, 2, 4)):
        for cuts in product(range(1, 5), repeat=n):
            for numbers in product(range(m + 1), repeat=n) if sum(cuts) == 4 else ():
                each = predict(costs, cuts, m, numbers, order)
                if not any(replace(each, places=tuple(places[:n])).missing):
                    fitting.append(each.time)
    if isinstance(best.settings.order.schedule, str):
        assert best.time == pytest.approx(min(fitting))
    else:  # a block, which has no name
        assert best.time < min(fitting)


def test_nothing_is_recomputed_if_all_fits() -> None:
    assert plan_for(profile(1, 1, saved=10), [Place()] * 2).settings.recomputed == (0, 0)


def test_as_few_micro_batches_are_recomputed_as_fit() -> None:
    costs = profile(1, 1, 1, 1, saved=10, held=10)
    # 2 layers: 20 bytes, 20 saved for each row, 1 byte of input for each row
    plan = plan_for(costs, [Place(memory=20 + 20 * 8 + 16)] * 2, chunks=8)

    assert plan.settings.recomputed == (4, 4)
    assert "lacks" in {each.reason.split()[0] for each in plan.alternatives}


def test_each_stage_recomputes_as_few_micro_batches_as_fit() -> None:
    """With 1F1B stage j of 4 holds 4 - j micro-batches; here each device has room for two.

    One of them is recomputed, so the first two stages keep one.
    """
    costs = profile(1, 1, 1, 1, saved=10, held=10)
    # 2 rows in each of 8 micro-batches, of which the input takes 1 byte for each row
    places = [Place(memory=10 + 2 * 20 + 4 * 2)] * 4

    plan = plan_for(costs, places, stages=4, chunks=8, schedule="1f1b")

    assert plan.settings.activation_checkpointing == [7, 7, 0, 0]
    assert "activation_checkpointing=[7, 7, 0, 0]" in str(plan)
    everywhere = predict(costs, (1, 1, 1, 1), 8, 7, ScheduleKind("1f1b"))
    assert plan.prediction.time < everywhere.time


def test_recomputation_that_is_given_for_each_stage_is_kept() -> None:
    plan = plan_for(profile(1, 1, 1), [Place()] * 3, chunks=4, activation_checkpointing=[4, 1])

    assert plan.settings == PlannedSettings(2, 4, (4, 1), balance=(1, 2))
    with pytest.raises(ValueError, match="got 2 numbers, \\[4, 1\\], for 3 stages"):
        plan_for(profile(1, 1, 1), [Place()] * 3, stages=3, activation_checkpointing=[4, 1])


@pytest.mark.parametrize("seed", range(40))
def test_balance_and_recomputation_of_a_drawn_model(seed: int) -> None:
    """At most a tenth slower than the fastest of all balances and recomputations that fit."""
    draw = Random(seed)
    name: Any = draw.choice(["fill_drain", "1f1b", "zero_bubble"])
    order = ScheduleKind.of(name, split=False)
    n, m = draw.randint(2, 3), draw.randint(2, 4)
    layers: list[LayerProfile] = []
    for _ in range(draw.randint(3, 5)):
        time, saved = draw.uniform(0.5, 3), draw.choice([0, 2, 5, 9])
        layers += profile(time, saved=saved, held=draw.choice([0, 20, 50])).layers
    costs = replace(profile(*[1] * len(layers)), layers=tuple(layers))
    held = sum(layer.parameter_bytes + 16 * layer.saved.at(1) for layer in layers)
    places = tuple(Place(memory=draw.uniform(0.3, 0.8) * held / n + 40) for _ in range(n))

    fitting = [
        each.time
        for cuts in product(range(1, len(layers)), repeat=n)
        if sum(cuts) == len(layers)
        for numbers in product(range(m + 1), repeat=n)
        if not any(
            (each := replace(predict(costs, cuts, m, numbers, order), places=places)).missing
        )
    ]

    if not fitting:
        with pytest.raises(NoPlan):
            plan_for(costs, places, stages=n, chunks=m, schedule=name)
        return
    found = plan_for(costs, places, stages=n, chunks=m, schedule=name, split_backward=order.split)
    assert found.prediction.time <= 1.1 * min(fitting)


def test_more_micro_batches_until_they_cost_more_than_the_bubble() -> None:
    free = plan_for(profile(1, 1), [Place()] * 2, stages=2)
    costly = plan_for(profile(1, 1, fixed=3), [Place()] * 2, stages=2)

    assert free.settings.chunks == 16
    assert 1 < costly.settings.chunks < 16
    assert any("bubble" in each.reason for each in costly.alternatives)
    assert any("smaller micro-batches" in each.reason for each in costly.alternatives)


def test_fewer_stages_where_that_is_faster() -> None:
    plan = plan_for(profile(1, 100), [Place()] * 4, chunks=1)

    assert len(plan.settings.balance) == 1


def test_faster_devices_are_taken_first() -> None:
    plan = plan_for(profile(1, 1), [Place(speed=0.01), Place(speed=1.5), Place()])

    assert plan.prediction.devices == (1, 2)


def test_nearest_profile_counts() -> None:
    small = replace(profile(5), rows=2, chunks=8)

    assert plan_for([profile(1), small], [Place()], chunks=8).prediction.time == 16 * 5 * 3
    assert plan_for([profile(1), small], [Place()], chunks=1).prediction.time == 16 * 3


def test_nothing_fits_says_what_is_missing_where() -> None:
    costs = profile(1, 1, held=3 * GIB)

    with pytest.raises(NoPlan) as caught:
        plan_for(costs, [Place(memory=2 * GIB), Place(memory=4 * GIB)])

    assert "lacks 1 GiB on device 0 (stage 0: 3 of 2 GiB)" in str(caught.value)
    assert "fits devices of 3 GiB" in str(caught.value)
    assert caught.value.nearest.settings.balance == (1, 1)


def test_given_values_are_kept() -> None:
    plan = plan_for(
        profile(1, 1, 1),
        [Place()] * 2,
        balance=[2, 1],
        chunks=3,
        activation_checkpointing="except_last",
    )

    assert plan.settings == PlannedSettings(2, 3, (2, 2), balance=(2, 1))
    assert plan.settings.activation_checkpointing == 2


def test_more_stages_than_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="3 stages and 2 devices"):
        plan_for(profile(1, 1, 1), [Place()] * 2, stages=3)


def test_plan_is_json() -> None:
    plan = plan_for(profile(1, 1, saved=3, held=8), [Place(memory=1000), Place()])
    found = json.loads(json.dumps(plan.as_dict()))

    assert found["balance"] == [1, 1]
    assert found["stages"][0]["limit"] == 1000
    assert found["stages"][1]["limit"] is None
    assert found["stages"][0]["layers"] == ["layer 0"]
    assert all("reason" in each for each in found["alternatives"])
    assert str(plan).startswith("balance=[1, 1], chunks=16, activation_checkpointing='never': ")


# What is on the host.

ANYWHERE: Any = {"weights": ("device", "host"), "offload": (False, True)}


def test_nothing_is_on_the_host_if_all_fits_the_devices() -> None:
    plan = plan_for(profile(1, 1, saved=10, held=10), [Place()] * 2, **ANYWHERE)

    assert (plan.settings.weights, plan.settings.offload) == ("device", False)
    reasons = [each.reason for each in plan.alternatives if each.prediction.settings.offload]
    assert reasons == ["as fast, and no simpler"] * 2


def test_weights_are_on_the_host_if_they_fit_no_device() -> None:
    """A device has the weights and gradients of two stages, whatever the number of stages."""
    costs = profile(*[1] * 8, saved=1, held=100)
    two = [Place(memory=2 * 100 + 100, host_speed=100)] * 2

    with pytest.raises(NoPlan, match="2 devices of .* would do, with .*weights='host'"):
        plan_for(costs, two, chunks=4)
    plan = plan_for(costs, two, chunks=4, weights=("device", "host"))

    settings = plan.settings
    assert (settings.weights, settings.stages, set(settings.balance)) == ("host", 8, {1})
    assert plan.prediction.devices == (0, 1) * 4
    assert not any(plan.prediction.missing)
    assert {stage.memory.parameters for stage in plan.prediction.stages} == {0, 100}
    assert str(settings).endswith(", weights='host'")
    assert plan.as_dict()["weights"] == "host"


def test_few_rows_wait_for_weights() -> None:
    """Weights that are longer on their way than a stage computes: more rows cost no more."""
    costs = profile(*[1] * 4, held=1000)
    slow = Place(memory=2100, host_speed=1)

    plan = plan_for(costs, [slow], stages=4, chunks=1, weights=("host",))

    # The weights of four stages come, and of the first two again. What waits for none of them, as
    # they are there or come meanwhile: forward and backward of the last stage, another backward.
    assert plan.prediction.time == 6 * 1000 + 16 + 32 + 32


def test_activations_wait_on_the_host_if_they_fit_no_device() -> None:
    costs = profile(1, 1, saved=10)
    places = [Place(memory=2 * 2 * 11, host_speed=1000)] * 2

    plan = plan_for(costs, places, chunks=8, activation_checkpointing="never", **ANYWHERE)
    with pytest.raises(NoPlan, match="would do, with"):
        plan_for(costs, places, chunks=8, activation_checkpointing="never")

    assert (plan.settings.weights, plan.settings.offload) == ("device", True)
    assert plan.prediction.time == predict(costs, (1, 1), 8, "never").time
    assert "offload_activations=True" in str(plan)
    for stage, over_time in zip(
        plan.prediction.stages, plan.prediction.memory_over_time(), strict=True
    ):
        assert max(held for _, held in over_time) == stage.memory.total <= places[0].memory


def test_activations_on_a_slow_way_take_as_long_as_it() -> None:
    costs = profile(1, 1, saved=10)

    plan = plan_for(
        costs,
        [Place(host_speed=5)] * 2,
        stages=2,
        chunks=1,
        activation_checkpointing="never",
        offload=(True,),
    )

    # 16 rows of 10 saved bytes, and of 1 that comes in on the second stage, with 5 in a unit
    assert plan.prediction.time == 16 * (10 + 11) / 5 * 2


MOVED: Any = {"activation_checkpointing": "never", "balance": (1, 1), "chunks": 8}


@pytest.mark.parametrize("room, waiting", [(8, 0), (7, 1), (6, 2), (5, 3), (2, 6)])
def test_as_few_activations_as_fit_wait_on_the_host(room: int, waiting: int) -> None:
    """Two of those that wait are on the device, too: at work, and on the way.

    The second stage holds the inputs from the first one besides: 11 bytes for each of two rows.
    """
    costs = profile(1, 1, saved=10)
    places = [Place(memory=room * 2 * 11, host_speed=5)] * 2

    plan = plan_for(costs, places, offload=("auto",), **MOVED)

    numbers = [waiting + 2] * 2 if waiting else False
    assert plan.settings.offload_activations == (True if waiting == 6 else numbers)
    assert not any(plan.prediction.missing)
    everything = plan_for(costs, places, offload=(True,), **MOVED)
    if waiting < 6:
        assert plan.prediction.time < everything.prediction.time
        assert not waiting or "offload_activations=[" in str(plan)


@pytest.mark.parametrize("name", ["fill_drain", "1f1b", "zero_bubble"])
def test_drawn_plans_with_some_activations_on_the_host(name: Any) -> None:
    """Of numbers that fit, each one less on all stages of a device would not."""
    random = Random(3)
    for _ in range(20):
        costs = profile(*(random.randint(1, 4) for _ in range(4)), saved=random.randint(5, 9))
        places = [Place(memory=random.randint(20, 300), host_speed=random.randint(2, 50))] * 3
        options: Any = {"chunks": 8, "schedule": name, "split_backward": name == "zero_bubble"}
        try:
            plan = plan_for(costs, places, offload=("auto",), **options)
        except NoPlan:
            continue
        prediction, numbers = plan.prediction, plan.settings.offload
        assert not any(prediction.missing)
        if not isinstance(numbers, tuple):
            continue
        for j, number in enumerate(numbers):
            if number:
                less = (*numbers[:j], number - 1, *numbers[j + 1 :])
                settings = plan.settings._replace(offload=less)
                assert replace(prediction, settings=settings).missing[j]


def test_activations_as_listed_wait_on_the_host() -> None:
    costs = profile(1, 1, saved=10)

    plan = plan_for(costs, [Place()] * 2, chunks=8, offload=([5, 0],))

    assert plan.settings.offload_activations == plan.as_dict()["offload_activations"] == [5, 0]
    with pytest.raises(ValueError, match="for each stage: got 2 numbers"):
        plan_for(costs, [Place()] * 3, stages=3, offload=([5, 0],))


@pytest.mark.parametrize("order", KINDS)
@pytest.mark.parametrize("m, devices", [(1, 1), (4, 2), (8, 4)])
def test_most_micro_batches_between_forward_and_backward(
    order: ScheduleKind, m: int, devices: int
) -> None:
    stages = 2 * devices if order.definition.folded else devices
    placement = order.placement(stages, devices)
    if not order.possible(m, placement):
        pytest.skip("the schedule needs other numbers")
    expected, alive = [0] * stages, [0] * stages
    for row in order.build(m, placement).rows:
        for kind, _, j in row:
            if j >= 0 and kind in (Kind.FORWARD, Kind.BACKWARD):
                alive[j] += 1 if kind is Kind.FORWARD else -1
                expected[j] = max(expected[j], alive[j])

    assert list(most_alive(order, m, placement)) == expected


def test_operations_tell_no_time_of_transfers() -> None:
    costs = replace(profile(1, 1, held=10), unit="FLOP")

    host, device = (
        plan_for(costs, [Place(host_speed=1)], chunks=2, stages=1, weights=(where,)).prediction.time
        for where in ("host", "device")
    )

    assert host == device


# Schedules.


def test_more_stages_than_layers() -> None:
    with pytest.raises(ValueError, match="at least: got 4 stages for 3 layers"):
        plan_for(profile(1, 1, 1), [Place()] * 4, stages=4)


def test_schedule_that_no_number_of_stages_allows() -> None:
    with pytest.raises(ValueError, match="got schedule='zero_bubble_v' for 3 layers on 2 devices"):
        plan_for(profile(1, 1, 1), [Place()] * 2, schedule="zero_bubble_v")


def test_bubble_of_one_stage_is_not_less_than_nothing() -> None:
    """Rounding errors made it -1e-16, which was printed as -0.0%."""
    plan = plan_for(profile(2.3, 1.3, 0.9, 1.6, 1.3), [Place()], chunks=3)

    assert plan.prediction.bubble == 0


def test_schedules_that_a_balance_does_not_allow_are_not_chosen() -> None:
    """Zero bubble, which has a stage on each device, had ended the search among all schedules."""
    plan = plan_for(profile(1, 1, 1, 1), [Place()] * 2, balance=[1] * 4, schedule="auto")

    assert plan.settings.stages == 4


def test_schedule_with_a_loss_for_each_micro_batch_is_not_chosen_unless_asked_for() -> None:
    costs = profile(1, 1, saved=10)
    places = [Place(memory=50)] * 2

    plan = plan_for(costs, places, stages=2, chunks=8)
    asked = plan_for(costs, places, stages=2, chunks=8, schedule="auto", split_backward=None)

    assert plan.settings.order == FILL_DRAIN
    assert asked.settings.order.by_micro_batch
    (other,) = [a for a in plan.alternatives if a.prediction.settings.order == ScheduleKind("1f1b")]
    assert "less time, but needs a loss for each micro-batch" in other.reason
    assert "write schedule='1f1b'" in other.reason


def test_backwards_are_split_where_that_is_faster_and_may_be() -> None:
    costs = profile(1, 1, 1, 1)
    places = [Place()] * 4

    chosen = plan_for(costs, places, chunks=4, split_backward=None)
    kept = plan_for(costs, places, chunks=4, split_backward=False)

    assert chosen.settings.order == ScheduleKind(split=True)
    assert kept.settings.order == FILL_DRAIN
    assert any("write split_backward=True" in each.reason for each in kept.alternatives)
    assert str(chosen.settings).endswith(", split_backward=True")
    assert chosen.as_dict()["schedule"] == "fill_drain"
    assert chosen.as_dict()["split_backward"] is True


def test_backwards_that_were_not_measured_in_two_parts_are_not_split() -> None:
    layers = tuple(replace(each, weights=None, inputs=None) for each in profile(1, 1).layers)

    plan = plan_for(
        replace(profile(1, 1), layers=layers), [Place()] * 2, schedule="auto", split_backward=None
    )

    assert not plan.settings.order.split
    assert {each.prediction.settings.order.split for each in plan.alternatives} == {False}


@pytest.mark.parametrize("order", KINDS, ids=str)
def test_schedule_that_is_given_is_kept(order: ScheduleKind) -> None:
    assert isinstance(order.schedule, str), "blocks are not planned"
    plan = plan_for(
        profile(1, 1, 1),
        [Place()] * 3,
        chunks=4,
        schedule=order.schedule,
        split_backward=order.split,
    )

    assert plan.settings.order == order
    assert {each.prediction.settings.order for each in plan.alternatives} == set(KINDS)


def test_several_stages_on_each_device_by_a_balance() -> None:
    costs = profile(1, 1, 1, 1)

    plan = plan_for(costs, [Place()] * 2, balance=[1, 1, 1, 1], schedule="1f1b")

    assert plan.prediction.devices == (0, 1, 0, 1)
    assert plan.settings.chunks % 2 == 0
    with pytest.raises(ValueError, match="needs a device for each stage"):
        plan_for(costs, [Place()] * 2, balance=[1, 1, 1, 1], schedule="zero_bubble")
    with pytest.raises(ValueError, match="multiple of the number of devices"):
        plan_for(costs, [Place()] * 2, balance=[1, 1, 1, 1], chunks=3, schedule="1f1b")
    with pytest.raises(ValueError, match="divides the number of stages"):
        plan_for(costs, [Place()] * 2, balance=[2, 1, 1])


@pytest.mark.parametrize("name", [name for name in SCHEDULES if SCHEDULES[name].folded])
def test_schedule_in_the_form_of_a_v(name: Any) -> None:
    costs = profile(*[1] * 8, saved=1, held=10)
    places = [Place(memory=10 * 2 + 2 * 16 * 3)] * 4

    plan = plan_for(costs, places, schedule=name)

    assert plan.prediction.devices == (0, 1, 2, 3, 3, 2, 1, 0)
    assert not any(plan.prediction.missing)
    assert plan.settings.order == ScheduleKind(name, split=True)
    with pytest.raises(ValueError, match="two on each"):
        plan_for(costs, places, schedule=name, stages=3)
    with pytest.raises(ValueError, match="weights='host'"):
        plan_for(costs, places, schedule=name, weights=("host",))


def test_plan_of_a_v_recomputes_as_little_as_fits() -> None:
    costs = profile(*[1] * 4, saved=10)
    roomy, tight = (
        plan_for(costs, [Place(memory=size)] * 2, chunks=8, schedule="v_half").settings
        for size in (1000, 70)
    )

    assert set(roomy.recomputed) == {0}
    assert 0 < min(tight.recomputed) == max(tight.recomputed)


@pytest.mark.parametrize("seed", range(8))
def test_plan_of_any_schedule_may_be_a_block(seed: int) -> None:
    """For costs that no schedule with a name suits; never slower than those."""
    draw = Random(seed)
    layers = tuple(
        replace(layer, inputs=LinearCost(0, draw.uniform(0.5, 2)), weights=LinearCost(0, 1))
        for layer in profile(*(draw.uniform(0.5, 3) for _ in range(4)), saved=10).layers
    )
    costs, places = replace(profile(1), layers=layers), [Place(memory=10 * 4 * 3)] * 4
    given: Any = {"stages": 4, "chunks": 16, "split_backward": None}
    names: list[Any] = ["fill_drain", "1f1b", "zero_bubble"]

    found = plan_for(costs, places, schedule="auto", **given).prediction

    assert not any(found.missing)
    for name in names:
        assert found.time <= plan_for(costs, places, schedule=name, **given).prediction.time
    if not isinstance(found.settings.order.schedule, str):
        assert "schedule=((0, " in str(found)
        assert json.loads(json.dumps(found.as_dict()))["schedule"][0][0] == 0
