"""Layers draw from generators of their own or private ones, and a recomputation draws the same.

Here are also the tests of ``private_generators``.
"""

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_gpipe.core.faithful.managers import together
from lightning_gpipe.core.faithful.random.generators import Randomness, SharedGenerators
from lightning_gpipe.core.faithful.random.private_generators import (
    PrivateGenerators,
    default_generator,
)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        yield


def attention(dropout_p: float) -> Tensor:
    q = torch.linspace(-1, 1, 64).reshape(1, 2, 8, 4)
    return F.scaled_dot_product_attention(q, q, q, dropout_p=dropout_p)


DRAWS: dict[str, Callable[[], Tensor]] = {
    "dropout": lambda: F.dropout(torch.ones(40)),
    "dropout2d": lambda: F.dropout2d(torch.ones(1, 40, 2, 2)),
    "alpha_dropout": lambda: F.alpha_dropout(torch.ones(40), training=True),
    "rrelu": lambda: F.rrelu(-torch.ones(40), training=True),
    "gumbel_softmax": lambda: F.gumbel_softmax(torch.ones(40)),
    "attention": lambda: attention(0.5),
    "rand": lambda: torch.rand(4),
    "rand_like": lambda: torch.rand_like(torch.ones(4)),
    "randn": lambda: torch.randn(4),
    "randint": lambda: torch.randint(1000, (4,)),
    "randperm": lambda: torch.randperm(40),
    "bernoulli": lambda: torch.bernoulli(torch.full((40,), 0.5)),
    "multinomial": lambda: torch.multinomial(torch.ones(40), 20),
    "normal": lambda: torch.normal(torch.zeros(4), torch.ones(4)),
    "poisson": lambda: torch.poisson(torch.full((40,), 3.0)),
    "normal_": lambda: torch.empty(4).normal_(),
    "exponential_": lambda: torch.empty(4).exponential_(),
    "random_": lambda: torch.empty(4).random_(),
}


@pytest.fixture(params=DRAWS)
def draw(request: pytest.FixtureRequest) -> Callable[[], Tensor]:
    return DRAWS[request.param]


def streams(seed: bytes = b"seed", j: int = 0) -> PrivateGenerators:
    return PrivateGenerators(seed, j, [CPU])


def test_own_generators_replay_what_was_drawn() -> None:
    own = Randomness([CPU])

    own.save(0)
    first = torch.rand(3)
    own.save(1)
    second = torch.rand(3)
    after = torch.default_generator.get_state()
    with together(own.replaying(1)):
        again = torch.rand(3)

    assert torch.equal(again, second)
    assert not torch.equal(again, first)
    assert torch.equal(torch.default_generator.get_state(), after)


def test_own_generators_replay_what_a_layer_draws_and_puts_back() -> None:
    own = Randomness([CPU])
    own.save(0)
    with torch.random.fork_rng(devices=[]):
        first = torch.rand(3)
    torch.rand(5)

    with together(own.replaying(0)), torch.random.fork_rng(devices=[]):
        again = torch.rand(3)

    assert torch.equal(first, again)


def test_own_generators_come_back_after_an_error() -> None:
    own = Randomness([CPU])
    own.save(0)
    torch.rand(3)
    after = torch.default_generator.get_state()

    with pytest.raises(KeyError), together(own.replaying(0)):
        raise KeyError

    assert torch.equal(torch.default_generator.get_state(), after)


def test_own_generators_draw_as_the_plain_module_would() -> None:
    state = torch.get_rng_state()
    plain = torch.rand(3)
    torch.set_rng_state(state)

    Randomness([CPU]).save(0)
    drawn = torch.rand(3)

    assert torch.equal(drawn, plain)


def test_private_stream_gives_the_same_again(draw: Callable[[], Tensor]) -> None:
    private = streams()

    with private.drawing(2):
        first = draw()
    torch.rand(7)
    with private.drawing(2):
        again = draw()

    assert torch.equal(first, again)
    assert private.drew


def test_private_stream_leaves_the_callers_generator(draw: Callable[[], Tensor]) -> None:
    before = torch.get_rng_state()

    with streams().drawing(0):
        draw()

    assert torch.equal(torch.get_rng_state(), before)


def test_private_stream_goes_on_within_a_micro_batch(draw: Callable[[], Tensor]) -> None:
    with streams().drawing(0):
        assert not torch.equal(draw(), draw())


def test_streams_of_micro_batches_stages_and_seeds_differ(draw: Callable[[], Tensor]) -> None:
    places = [(b"seed", 0, 0), (b"seed", 1, 0), (b"seed", 0, 1), (b"dees", 0, 0), (b"seed", 1, 1)]
    drawn = []
    for seed, i, j in places:
        with streams(seed, j).drawing(i):
            drawn.append(tuple(draw().flatten().tolist()))

    assert len(set(drawn)) == len(places)


def test_streams_do_not_depend_on_threads_or_order(draw: Callable[[], Tensor]) -> None:
    def run(j: int, order: list[int], found: dict[tuple[int, int], Tensor]) -> None:
        private = streams(j=j)
        for i in order:
            with private.drawing(i):
                found[i, j] = torch.stack([draw() for _ in range(5)])

    alone: dict[tuple[int, int], Tensor] = {}
    for j in range(2):
        run(j, [0, 1, 2, 3], alone)
    together: dict[tuple[int, int], Tensor] = {}
    threads = [
        threading.Thread(target=run, args=(j, order, together))
        for j, order in [(1, [3, 2, 1, 0]), (0, [2, 0, 3, 1])]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert alone.keys() == together.keys()
    assert all(torch.equal(alone[place], together[place]) for place in alone)


def test_private_stream_gives_plausible_numbers() -> None:
    with streams().drawing(0):
        dropped = F.dropout(torch.ones(10_000), p=0.25)

    assert (dropped == 0).double().mean().item() == pytest.approx(0.25, abs=0.02)
    assert dropped.max().item() == pytest.approx(4 / 3)


def test_gradient_of_dropout_belongs_to_its_mask() -> None:
    x = torch.ones(100, requires_grad=True)

    with streams().drawing(0):
        y = F.dropout(x)
    y.sum().backward()

    assert x.grad is not None
    assert torch.equal(x.grad, y.detach())


@pytest.mark.parametrize(
    "quiet",
    [
        lambda: attention(0.0),
        lambda: F.dropout(torch.ones(4), training=False),
        lambda: F.rrelu(torch.ones(4), training=False),
        lambda: F.rrelu_(torch.ones(4)),
        lambda: torch.ones(2, 2) @ torch.ones(2, 2),
    ],
    ids=["attention", "dropout", "rrelu", "rrelu in place", "product"],
)
def test_operators_that_draw_nothing_now(quiet: Callable[[], Tensor]) -> None:
    private = streams()

    with private.drawing(0):
        quiet()

    assert not private.drew


def test_a_generator_of_the_users_own_is_left_alone() -> None:
    expected = torch.rand(3, generator=torch.Generator().manual_seed(5))
    own = torch.Generator().manual_seed(5)
    private = streams()

    with private.drawing(0):
        drawn = torch.rand(3, generator=own)

    assert torch.equal(drawn, expected)
    assert not private.drew


def test_devices_that_are_not_shared_are_left_alone() -> None:
    private = PrivateGenerators(b"seed", 0, [])
    before = torch.get_rng_state()

    with private.drawing(0):
        torch.rand(3)

    assert not torch.equal(torch.get_rng_state(), before)
    assert not private.drew


@pytest.mark.parametrize("private", [True, False])
def test_recomputation_draws_the_same(private: bool) -> None:
    randomness = Randomness([CPU], streams() if private else None)
    randomness.save(0)
    with together(randomness.drawing(0)):
        first = torch.rand(3)
    with together(randomness.drawing(1)):
        torch.rand(3)

    with together(randomness.replaying(0)):
        again = torch.rand(3)

    assert torch.equal(first, again)


def test_shared_generators_know_whether_they_moved() -> None:
    shared = SharedGenerators([CPU])

    still = shared.moved()
    torch.rand(1)

    assert not still
    assert shared.moved()


def test_shared_generators_rewind() -> None:
    shared = SharedGenerators([CPU])
    first = torch.rand(3)

    shared.rewind()

    assert not shared.moved()
    assert torch.equal(torch.rand(3), first)


def test_shared_generators_advance_to_other_streams() -> None:
    def drawn() -> list[float]:
        with SharedGenerators([CPU]).private(0).drawing(0):
            return torch.rand(3).tolist()

    first, again = drawn(), drawn()
    SharedGenerators([CPU]).advance()

    assert first == again
    assert drawn() != first


def test_streams_follow_the_seed() -> None:
    def drawn(seed: int) -> list[float]:
        torch.manual_seed(seed)
        with SharedGenerators([CPU]).private(0).drawing(0):
            return torch.rand(3).tolist()

    assert drawn(1) == drawn(1) != drawn(2)


def test_cpu_has_one_default_generator() -> None:
    assert default_generator(CPU) is torch.default_generator


def test_the_default_generator_by_name_is_redirected() -> None:
    before = torch.get_rng_state()

    with streams().drawing(0):
        torch.rand(3, generator=torch.default_generator)

    assert torch.equal(torch.get_rng_state(), before)
