"""Promise: models written for torchgpipe run, in a plain nn.Sequential as in a pipeline."""

import pickle
from collections.abc import Callable, Iterator
from copy import copy, deepcopy
from io import BytesIO
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe.core.skip.declare import (
    Namespace,
    in_flight,
    pop,
    skippable,
    stash,
    using_table,
    with_skips,
)
from tests.support.models import perceptron, rows
from tests.support.skip_layers import Forward, Pop, Stash, added, pair


@pytest.fixture(autouse=True)
def _nothing_in_flight() -> Iterator[None]:
    with using_table({}):
        yield


@skippable(stash=["a", "b"])
class StashTwo(nn.Module):
    def forward(self, x: Tensor) -> Forward:
        yield stash("b", x * 3)
        yield stash("a", x * 2)
        return x


@skippable(pop=["a", "b"])
class PopTwo(nn.Module):
    def forward(self, x: Tensor) -> Forward:
        a = yield pop("a")
        b = yield pop("b")
        return x + 10 * a + 100 * b


@skippable(stash=["old"])
class Old(nn.Module):
    def forward(self, x: Tensor) -> Forward:
        yield stash("old", x * 4)
        return x


@skippable(stash=["skip"], pop=["old"])
class Relay(nn.Module):
    def forward(self, x: Tensor) -> Forward:
        old = yield pop("old")
        yield stash("skip", old + 1)
        return x


def one() -> Tensor:
    return torch.ones(1)


# Generators.


def test_several_stashes_and_pops_in_any_order() -> None:
    module = nn.Sequential(StashTwo(), nn.Tanh(), PopTwo())

    assert torch.equal(module(one()), one().tanh() + 10 * 2 + 100 * 3)
    assert not in_flight()


def test_layer_that_pops_and_stashes() -> None:
    assert torch.equal(nn.Sequential(Old(), Relay(), nn.Tanh(), Pop())(one()), one().tanh() + 5)


def test_none_is_passed_on_as_any_tensor() -> None:
    popped: list[Any] = []
    module = nn.Sequential(Stash(lambda x: None), Pop(lambda x, skip: popped.append(skip)))

    module(one())

    assert popped == [None]
    assert not in_flight()


def test_forward_that_is_no_generator() -> None:
    @skippable()
    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    assert torch.equal(Plain()(one()), one() + 1)


@pytest.mark.parametrize("grad", [True, False])
def test_gradients_reach_the_stash_as_through_a_residual(grad: bool) -> None:
    linear = nn.Linear(3, 3).double()
    module = nn.Sequential(Stash(), linear, nn.Tanh(), Pop(torch.mul))
    x = rows(4)

    with torch.set_grad_enabled(grad):
        y, expected = module(x), x * linear(x).tanh()

    assert torch.equal(y, expected)
    assert y.requires_grad == grad
    if grad:
        found = torch.autograd.grad(y.square().sum(), x)
        assert torch.equal(*found, *torch.autograd.grad(expected.square().sum(), x))


def nested(*layers: nn.Module, depth: int) -> nn.Module:
    module: nn.Module = nn.Sequential(*layers)
    for _ in range(depth):
        module = nn.Sequential(nn.ModuleDict({"inner": module})["inner"])
    return module


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_nested_modules_of_different_depths(depth: int) -> None:
    one_, other = pair(lambda x: x * 2)
    module = nn.Sequential(nested(nn.Tanh(), one_, depth=depth), nn.Tanh(), nested(other, depth=1))

    y = one().tanh()
    assert torch.equal(module(one()), y.tanh() + y * 2)


# What the class stays.


def test_class_stays_itself() -> None:
    class Layer(nn.Module):
        """What it does."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.calls = nn.Buffer(torch.zeros(()))

        def forward(self, x: Tensor) -> Forward:
            """How it does it."""
            yield stash("skip", x)
            return self.linear(x)

    keys = list(Layer().state_dict())
    decorated = skippable(stash=["skip"])(Layer)
    layer = decorated()
    layer.isolate(Namespace())  # type: ignore[operator]

    assert decorated is Layer
    assert (Layer.__name__, Layer.__doc__, Layer.forward.__doc__) == (
        "Layer",
        "What it does.",
        "How it does it.",
    )
    assert list(layer.state_dict()) == keys
    assert list(dict(layer.named_modules())) == ["", "linear"]
    assert dict(layer.named_parameters()).keys() == {"linear.weight", "linear.bias"}


def test_subclass_stashes_as_its_base() -> None:
    class Twice(Stash):
        def __init__(self) -> None:
            super().__init__(lambda x: x * 2)

    assert torch.equal(nn.Sequential(Twice(), Pop())(one()), one() * 3)


def test_subclass_that_calls_the_forward_of_its_base() -> None:
    class Negative(Stash):
        def forward(self, x: Any) -> Any:
            return super().forward(-x)

    assert torch.equal(nn.Sequential(Negative(), nn.ReLU(), Pop())(one()), -one())


# Namespaces.


def test_isolate_returns_the_layer() -> None:
    layer = Stash()

    assert layer.isolate(Namespace()) is layer  # type: ignore[operator]


def test_same_names_in_different_namespaces() -> None:
    (first, last), (second, third) = pair(lambda x: x * 2), pair(lambda x: x * 3)
    crossing = nn.Sequential(first, second, last, third)

    assert torch.equal(crossing(one()), one() + 2 + 3)


def test_isolate_only_some_names() -> None:
    namespace = Namespace()
    two, take = StashTwo(), PopTwo()
    two.isolate(namespace, only=["a"])  # type: ignore[operator]
    module = nn.Sequential(two, take)

    with pytest.raises(RuntimeError, match=r"'a' must be stashed before PopTwo pops it"):
        module(one())
    take.isolate(namespace, only=["a"])  # type: ignore[operator]
    assert torch.equal(module(one()), one() + 20 + 300)


def test_isolate_names_one_by_one() -> None:
    one_, other = Namespace(), Namespace()
    outer: list[Any] = [StashTwo(), PopTwo()]
    for layer in outer:
        layer.isolate(one_, only=["a"]).isolate(other, only=["b"])
    module = nn.Sequential(outer[0], StashTwo(), PopTwo(), outer[1])

    x = one() + 20 + 300
    assert torch.equal(module(one()), x + 20 + 300)


def test_isolate_names_that_the_layer_does_not_declare() -> None:
    with pytest.raises(ValueError) as error:
        StashTwo().isolate(Namespace(), only=["a", "c"])  # type: ignore[operator]

    assert str(error.value) == (
        "only must name what StashTwo stashes or pops: got ['c']. It declares stash=['a', 'b'] and "
        "pop=[]."
    )


def saved_and_loaded(module: nn.Module) -> nn.Module:
    file = BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert isinstance(loaded, nn.Module)
    return loaded


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy,
    "deepcopy": deepcopy,
    "pickle": lambda each: pickle.loads(pickle.dumps(each)),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_copies_of_a_namespace_are_equal(copied: Callable[[Any], Any]) -> None:
    namespace, other = Namespace(), Namespace()

    assert copied(namespace) == namespace
    assert len({copied(namespace), namespace, other}) == 2
    assert namespace != other


@pytest.mark.parametrize("copied", [deepcopy, saved_and_loaded, COPIES["pickle"]])
def test_copied_model(copied: Callable[[nn.Module], nn.Module]) -> None:
    (first, last), (second, third) = pair(torch.sin), pair(torch.cos)
    module = nn.Sequential(first, second, *perceptron(2), third, last)

    other = copied(module)

    assert torch.equal(other(rows(3)), module(rows(3)))
    assert list(other.state_dict()) == list(module.state_dict())


def test_copies_of_layers_find_one_another() -> None:
    stash_, pop_ = pair()

    assert torch.equal(nn.Sequential(deepcopy(stash_), copy(pop_))(one()), one() * 2)


# Plain forwards.


@with_skips(stash=["a", "b"])
class PlainStash(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
        return x + 1, {"b": x * 3, "a": None}


@with_skips(pop=["b", "a"])
class PlainPop(nn.Module):
    def forward(self, x: Tensor, b: Tensor, a: Tensor | None) -> Tensor:
        assert a is None
        return x + 10 * b


def test_plain_forwards() -> None:
    namespace = Namespace()
    layers: list[Any] = [PlainStash(), PlainPop()]
    module = nn.Sequential(layers[0].isolate(namespace), nn.Tanh(), layers[1].isolate(namespace))

    assert torch.equal(module(one()), (one() + 1).tanh() + 30)
    assert not in_flight()


def test_plain_forward_that_pops_and_stashes() -> None:
    @with_skips(stash=["new"], pop=["skip"])
    class Layer(nn.Module):
        def forward(self, x: Tensor, skip: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return x - skip, {"new": skip * 7}

    @with_skips(pop=["new"])
    class Last(nn.Module):
        def forward(self, x: Tensor, new: Tensor) -> Tensor:
            return added(x, new)

    assert torch.equal(nn.Sequential(Stash(), Layer(), Last())(one()), one() * 7)
