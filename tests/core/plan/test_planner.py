"""Plans: the fastest of those that fit."""

import json
from dataclasses import replace
from itertools import product

import pytest

from lightning_gpipe.core.plan import (
    Action,
    Carried,
    Kind,
    LayerProfile,
    ModelProfile,
    NoPlan,
    PerRow,
    Place,
    Prediction,
    Settings,
    plan_for,
    sizes_of,
)

GIB = 2**30


def profile(*times: float, saved: float = 0, held: int = 0, fixed: float = 0) -> ModelProfile:
    """Layers that take so long for each row, forward, and twice that backward."""
    layers = tuple(
        LayerProfile(
            f"layer {k}",
            forward=PerRow(fixed, time),
            dropping=PerRow(fixed, time),
            backward=PerRow(2 * fixed, 2 * time),
            saved=PerRow(0, saved),
            parameters=held // 4,
            parameter_bytes=held,
        )
        for k, time in enumerate(times)
    )
    carried = tuple(Carried(k, k + 1, PerRow(0, 1)) for k in range(len(times) - 1))
    return ModelProfile(layers, carried, LayerProfile("around"), 16, 1, "s", "cpu")


def predict(
    costs: ModelProfile, balance: tuple[int, ...], chunks: int, recomputed: int
) -> Prediction:
    n = len(balance)
    return Prediction(
        Settings(balance, chunks, (recomputed,) * n),
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

    assert first.memory == (100, 0, 0, 0, 10 * 4, 0)
    assert last.memory == (100, 0, 0, 0, 10 * 4, 16)
    assert (first.sent, last.sent) == (16, 0)


def test_fastest_of_all_is_found() -> None:
    costs = profile(3, 1, 2, 2, saved=7, held=50, fixed=0.7)
    places = [Place(memory=320), Place(memory=340), Place(memory=300)]

    best = plan_for(costs, places).prediction

    fitting = []
    for n, m in product((1, 2, 3), (1, 2, 4, 8, 16)):
        for k in range(m + 1):
            for cuts in product(range(1, 5), repeat=n):
                if sum(cuts) == 4:
                    each = replace(predict(costs, cuts, m, k), places=tuple(places[:n]))
                    if not any(each.missing):
                        fitting.append(each.time)
    assert best.time == pytest.approx(min(fitting))


def test_nothing_is_recomputed_if_all_fits() -> None:
    assert plan_for(profile(1, 1, saved=10), [Place()] * 2).settings.recomputed == (0, 0)


def test_as_few_micro_batches_are_recomputed_as_fit() -> None:
    costs = profile(1, 1, 1, 1, saved=10, held=10)
    # 2 layers: 20 bytes, 20 saved for each row, 1 byte of input for each row
    plan = plan_for(costs, [Place(memory=20 + 20 * 8 + 16)] * 2, chunks=8)

    assert plan.settings.recomputed == (4, 4)
    assert "lacks" in {each.reason.split()[0] for each in plan.alternatives}


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

    assert plan.settings == Settings((2, 1), 3, (2, 2))
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
