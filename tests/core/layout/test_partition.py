import re
from functools import wraps
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe.core.layout.partition import Partition, check_balance, check_sequential, cut
from tests.support.models import Residual


def layers(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(count)))


def test_cut_keeps_the_layers_and_their_order() -> None:
    module = layers(6)

    partitions = cut(module, [1, 3, 2])

    assert [layer for p in partitions for layer in p.layers] == list(module)
    assert [(p.index, p.indices) for p in partitions] == [
        (0, range(1)),
        (1, range(1, 4)),
        (2, range(4, 6)),
    ]


def test_cut_leaves_the_module_as_it_was() -> None:
    module = layers(4)
    keys, children = list(module.state_dict()), dict(module.named_children())

    cut(module, [3, 1])

    assert list(module.state_dict()) == keys
    assert dict(module.named_children()) == children


def test_cut_checks_the_module_and_the_balance() -> None:
    with pytest.raises(TypeError, match="nn.Sequential"):
        cut(nn.Linear(2, 2), [1])  # type: ignore[arg-type]  # the fault under test
    with pytest.raises(ValueError, match="number of layers"):
        cut(layers(3), [1, 1])


def test_partition_prints_its_layers() -> None:
    assert [str(p) for p in cut(layers(6), [1, 2, 3])] == ["layer 0", "layers 1..2", "layers 3..5"]


def test_partition_with_names_prints_them() -> None:
    blocks = tuple(layers(3))
    named = Partition(1, 3, blocks, ("blocks.3", "blocks.4", "blocks.5"))

    assert str(named) == "blocks.3..5"
    assert named.titles == ["blocks.3", "blocks.4", "blocks.5"]
    assert str(Partition(1, 3, blocks[:2], ("blocks.3", "head"))) == "blocks.3..head"
    assert str(Partition(1, 3, blocks[:1], ("blocks.3",))) == "blocks.3"
    assert Partition(1, 3, blocks).titles == ["layer 3", "layer 4", "layer 5"]
    assert str(Partition(1, 3, ())) == Partition(1, 3, ()).span == "no modules"
    assert str(Partition(1, 3, blocks[:2], ("a.b.3", "a.c.1.2"))) == "a.b.3..c.1.2"
    groups = Partition(0, 0, blocks[:2], ("0.0", "1"))
    assert (str(groups), groups.span) == ("layers 0.0..1", "0.0..1")
    assert str(Partition(1, 3, blocks[:1], ("0.1",))) == "layer 0.1"


def test_partition_lists_a_shared_parameter_once() -> None:
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    two.weight = one.weight

    parameters = Partition(0, 0, (one, two)).parameters

    assert [id(p) for p in parameters] == [id(one.weight), id(one.bias), id(two.bias)]


@pytest.mark.parametrize(
    "module", [nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict()]
)
def test_module_that_is_not_a_sequential(module: nn.Module) -> None:
    with pytest.raises(TypeError) as error:
        check_sequential(module, "net.body")

    assert str(error.value) == (
        f"net.body must be an nn.Sequential, because a pipeline runs its layers one after another: "
        f"got {type(module).__name__}. Put the layers to pipeline into an nn.Sequential, and call "
        f"that in forward."
    )


class Named(nn.Sequential):
    def extra(self) -> str:
        return "a subclass may add what it likes, as long as forward is the plain one"


def test_sequential_that_overrides_forward() -> None:
    with pytest.raises(TypeError, match=r"net must have the forward.* got Residual, which over"):
        check_sequential(Residual(nn.Linear(2, 2)), "net")


def test_sequential_that_inherits_an_override() -> None:
    class Deeper(Residual):
        pass

    with pytest.raises(TypeError, match="Deeper"):
        check_sequential(Deeper(nn.Linear(2, 2)))


def test_sequential_with_other_methods_is_accepted() -> None:
    check_sequential(Named(nn.Linear(2, 2)))


def test_residual_as_one_layer_is_accepted() -> None:
    check_sequential(nn.Sequential(Residual(nn.Linear(2, 2))))


def test_empty_sequential() -> None:
    with pytest.raises(ValueError, match=r"module must have at least one layer: got an empty"):
        check_sequential(nn.Sequential())


def test_same_layer_twice_names_every_place() -> None:
    linear, relu = nn.Linear(2, 2), nn.ReLU()
    module = nn.Sequential(linear, relu, nn.Linear(2, 2), relu, linear, relu)

    with pytest.raises(ValueError, match=re.escape("got Linear at 0 and 4; ReLU at 1 and 3 and 5")):
        check_sequential(module)


def test_tied_weights_are_not_the_same_layer() -> None:
    module = layers(2)
    module[1].weight = module[0].weight

    check_sequential(module)


@pytest.mark.parametrize("balance", [[6], [1, 5], [2, 2, 2], (3, 3), [1] * 6])
def test_balance_that_fits(balance: list[int]) -> None:
    check_balance(balance, layers=6)


@pytest.mark.parametrize("balance", [[2, 3], [4, 3], [7]])
def test_balance_with_a_wrong_sum(balance: list[int]) -> None:
    with pytest.raises(ValueError) as error:
        check_balance(balance, layers=6, name="net.layers")

    assert str(error.value) == (
        f"balance must add up to the number of layers: got balance={balance} "
        f"(sum {sum(balance)}) for the 6 layers of net.layers. "
        f"balance_by_parameters(module, stages={len(balance)}) finds one that fits, and in a "
        "Trainer balance='parameters' does."
    )


@pytest.mark.parametrize("balance", [[], [0, 6], [6, 0], [7, -1], [-6]])
def test_balance_with_an_empty_stage(balance: list[int]) -> None:
    with pytest.raises(ValueError, match="at least one layer") as error:
        check_balance(balance, layers=6)

    assert f"balance={balance} for the 6 layers of module" in str(error.value)


def test_more_stages_than_layers() -> None:
    with pytest.raises(ValueError, match="got 4 stages for the 3 layers of module"):
        check_balance([1, 1, 1, 1], layers=3)


@pytest.mark.parametrize(
    "balance, kinds",
    [([3.0, 3], "float, int"), ([True, 5], "bool, int"), ([3, "3"], "int, str"), ([None], "None")],
)
def test_balance_of_other_than_ints(balance: list[int], kinds: str) -> None:
    with pytest.raises(TypeError, match=re.escape(f"got balance={balance!r} (types {kinds}")):
        check_balance(balance, layers=6)


@pytest.mark.parametrize("balance", [6, "parameters", None, MappingProxyType({0: 6})])
def test_balance_that_is_not_a_list(balance: list[int]) -> None:
    with pytest.raises(TypeError, match=r"balance must be a list of ints.*got balance=") as error:
        check_balance(balance, layers=6)

    assert repr(balance) in str(error.value)


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.KLDivLoss(), nn.Bilinear(2, 2, 2)])
def test_layer_that_needs_two_arguments(loss: nn.Module) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh(), loss))

    with pytest.raises(TypeError) as error:
        check_sequential(module, "Model.layers")

    assert str(error.value) == (
        "each layer of Model.layers must take one argument, which the layer before returns: got "
        f"{type(loss).__name__} at 1.1. Leave a loss out of the layers, and compute it in "
        "training_step from the output and the targets. Give several values as one tuple."
    )


class Scaled(nn.Module):
    def forward(self, x: Tensor, factor: float = 2.0, *, shift: float = 0.0) -> Tensor:
        return x * factor + shift


class Added(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


def doubling(forward: Any) -> Any:
    @wraps(forward)
    def doubled(self: nn.Module, x: Tensor) -> Any:
        return forward(self, x, x)

    return doubled


class Doubled(nn.Module):
    @doubling
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class Halved(Added):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x / 4, x / 4)


def test_layers_that_can_be_called_with_one_argument() -> None:
    hooked = Added()
    hooked.register_forward_pre_hook(lambda _, args: args * 2)
    module = nn.Sequential(Scaled(), hooked, Doubled(), Halved(), nn.Identity(1, 2))

    check_sequential(module)

    assert module(torch.ones(2)).tolist() == [4.0, 4.0]
