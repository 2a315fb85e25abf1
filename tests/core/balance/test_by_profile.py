"""What measured layers cost a stage."""

from lightning_gpipe.core.balance.by_profile import (
    memory_costs,
    recomputing,
    stage_costs,
    time_costs,
)
from lightning_gpipe.core.balance.costs import Place, Transfer
from lightning_gpipe.core.balance.profiles import (
    CarriedValue,
    LayerProfile,
    LinearCost,
    ModelProfile,
)


def profile(chunks: int = 4) -> ModelProfile:
    """Layers of 1, 2 and 3 seconds per micro-batch, with 10, 20, 30 bytes and 5 that are saved."""
    layers = tuple(
        LayerProfile(
            str(k),
            forward=LinearCost(k),
            dropping=LinearCost(k),
            saved=LinearCost(5),
            parameter_bytes=10 * k,
        )
        for k in (1, 2, 3)
    )
    # The last layer is the first to save 3 bytes of its input.
    carried = (CarriedValue(0, 1, LinearCost(7)), CarriedValue(1, 2, LinearCost(7), LinearCost(3)))
    around = LayerProfile("around", parameter_bytes=100)
    return ModelProfile(layers, carried, around, 2, chunks, "s", "cpu")


def test_recomputed_micro_batches_take_their_forward_twice() -> None:
    costs = time_costs(profile())
    never, half = recomputing([Place()] * 2, profile(), [0, 2])

    assert costs.times_at(never) == [1, 2, 3]
    assert costs.times_at(half) == [1.5, 3, 4.5]
    assert costs.of_stages([2, 1], [half, never]) == [4.5, 3]


def test_of_recomputed_micro_batches_one_is_alive_at_a_time() -> None:
    places = recomputing([Place()] * 3, profile(), [0, 3, 4])

    assert [place.alive for place in places] == [4, 1, 1]


def test_micro_batches_that_are_alive_are_saved() -> None:
    costs = memory_costs(profile(), alive=1)

    assert costs.times_at(Place(extra=4)) == [30, 40, 50]
    assert costs.times_at(Place(extra=1)) == [15, 25, 35]
    assert costs.transfers == [Transfer(0, 1, 28), Transfer(1, 2, 28 - 3)]


def test_stages_of_a_balance() -> None:
    first, last = stage_costs(profile(), [2, 1], "always", "last")

    assert (first.time, last.time) == (4 * (2 + 4), 4 * 6)
    assert (first.memory, last.memory) == (15 + 25, 35 + 25 + 100)


def test_stages_that_recompute_differently() -> None:
    first, last = stage_costs(profile(), [2, 1], [0, 4], "last")

    assert (first.time, last.time) == (4 * 3, 4 * 6)
    assert (first.memory, last.memory) == (30 + 40, 35 + 25 + 100)
