"""Promise: an nn.Sequential whose layers are in groups is cut between its layers."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import GPipe, balance_by_parameters, plan
from lightning_gpipe.core.layout import balance_of_layers, groups_of, layers_of
from lightning_gpipe.skip import with_skips
from tests.support.models import assert_same, step
from tests.support.pipes import Pipe


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


def groups() -> nn.Sequential:
    torch.manual_seed(0)
    inner = nn.Sequential(linear(), nn.Tanh())
    first = nn.Sequential(linear(), nn.ReLU())
    return nn.Sequential(first, nn.Sequential(inner, linear()), linear()).double()


def group(model: nn.Module, path: str) -> nn.Sequential:
    found = model.get_submodule(path)
    assert isinstance(found, nn.Sequential)
    return found


def rows() -> Tensor:
    return torch.linspace(-1, 1, 24).reshape(6, 4).double()


class Doubled(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Called(nn.Sequential):
    def __call__(self, input: Tensor) -> Any:
        return 2 * super().__call__(input)


class Reversed(nn.Sequential):
    def __iter__(self) -> Iterator[nn.Module]:
        return reversed([*super().__iter__()])


NAMES = ["0.0", "0.1", "1.0.0", "1.0.1", "1.1", "2"]


def test_layers_of_nested_sequentials() -> None:
    model = groups()

    layers = layers_of(model)

    assert list(layers) == NAMES
    assert layers["1.0.1"] is model.get_submodule("1.0.1")
    assert groups_of(model) == {k: model.get_submodule(k) for k in ("0", "1", "1.0")}


@pytest.mark.parametrize(
    "other",
    [
        nn.Sequential(),
        *(kind(linear(), linear()) for kind in (Doubled, Called, Reversed)),
        nn.ModuleList([linear()]),
    ],
    ids=["empty", "own forward", "own call", "own order", "list"],
)
def test_module_that_is_no_group(other: nn.Module) -> None:
    assert list(layers_of(nn.Sequential(other, linear()))) == ["0", "1"]


def test_group_with_a_hook_is_one_layer() -> None:
    model = groups()
    model[0].register_forward_hook(lambda *_: None)

    assert list(layers_of(model)) == ["0", *NAMES[2:]]


def test_group_that_the_user_compiles_is_one_layer() -> None:
    model = groups()
    model[0].compile(backend="eager")

    assert list(layers_of(model)) == ["0", *NAMES[2:]]


def test_layer_in_two_groups() -> None:
    relu = nn.ReLU()
    model = nn.Sequential(nn.Sequential(linear(), relu), nn.Sequential(linear(), relu))

    assert list(layers_of(model)) == ["0", "1"]


@pytest.mark.parametrize(
    "balance, counted",
    [([2, 1], [5, 1]), ([1, 1, 1], [2, 3, 1]), ([3, 3], [3, 3]), ([6], [6]), ([4], [4])],
)
def test_balance_of_children_or_of_layers(balance: list[int], counted: list[int]) -> None:
    assert list(balance_of_layers(groups(), balance)) == counted


@pytest.mark.parametrize("balance", [[2, 1], [3, 3], ["0", "1.0.1"], [1, 2, 3]])
def test_same_numbers(pipe: Pipe, balance: list[int]) -> None:
    model = groups()
    piped = GPipe(deepcopy(model), balance, devices=["cpu"] * len(balance), chunks=3)

    assert_same(step(piped, rows())._asdict(), step(model, rows())._asdict())
    assert list(piped.state_dict()) == list(model.state_dict())


def test_names_of_layers_in_groups() -> None:
    piped = GPipe(groups(), [3, 3], devices=["cpu"] * 2)

    assert [str(stage.partition) for stage in piped.stages] == [
        "layers 0.0..1.0.0",
        "layers 1.0.1..2",
    ]


def test_balance_by_parameters_counts_layers_in_groups() -> None:
    assert balance_by_parameters(groups(), 2) == [3, 3]


def test_balance_that_fits_neither_count() -> None:
    with pytest.raises(ValueError, match=r"balance=\[2, 2\] \(sum 4\) for the 6 layers"):
        GPipe(groups(), [2, 2], devices=["cpu"] * 2)


def test_rebalance_by_children() -> None:
    piped = GPipe(groups(), [3, 3], devices=["cpu"] * 2)

    piped.rebalance([1, 2])

    assert piped.balance == [2, 4]


def test_layer_of_a_group_that_was_replaced() -> None:
    model = groups()
    piped = GPipe(model, [3, 3], devices=["cpu"] * 2)
    model.set_submodule("1.0.1", nn.ReLU())

    with pytest.raises(RuntimeError, match=r"layer '1.0.1' was Tanh .* another ReLU now"):
        piped(rows())


def test_group_that_was_replaced_by_one_of_the_same_layers() -> None:
    model = groups()
    piped = GPipe(model, [3, 3], devices=["cpu"] * 2)
    model[0] = nn.Sequential(*group(model, "0"))

    assert_same(piped(rows()).detach(), deepcopy(model)(rows()).detach())


@pytest.mark.parametrize("change", ["append", "delete", "share"])
def test_number_of_layers_that_changes_in_a_group(change: str) -> None:
    model = groups()
    piped = GPipe(model, [3, 3], devices=["cpu"] * 2)
    if change == "append":
        group(model, "1.0").append(nn.Tanh())
    elif change == "delete":
        del group(model, "1.0")[1]
    else:
        group(model, "1.0")[1] = group(model, "0")[1]

    with pytest.raises(RuntimeError, match=r"set up for 6 and has \d now"):
        piped(rows())


def test_hook_that_comes_after_setup() -> None:
    model = groups()
    piped = GPipe(model, [3, 3], devices=["cpu"] * 2)
    hook = group(model, "1.0").register_forward_hook(lambda *_: None)

    with pytest.raises(RuntimeError, match=r"got hooks on '1.0' since setup"):
        piped(rows())
    with pytest.warns(UserWarning, match=r"got hooks on '1.0' since setup"), torch.no_grad():
        piped(rows())
    hook.remove()
    piped(rows())


def test_forward_that_comes_after_setup() -> None:
    model = groups()
    piped = GPipe(model, [3, 3], devices=["cpu"] * 2)
    model[0].forward = lambda x: 2 * x

    with pytest.raises(RuntimeError, match=r"got a forward on '0' since setup"), torch.no_grad():
        piped(rows())


def test_pipeline_has_the_children_of_the_model() -> None:
    model = groups()
    piped = GPipe(model, [3, 3], devices=["cpu"] * 2)

    assert list(piped) == list(model.children())
    assert piped[1] is model[1]


def test_skips_between_layers_in_groups(pipe: Pipe) -> None:
    @with_skips(stash=["kept"])
    class Keep(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x, {"kept": x}

    @with_skips(pop=["kept"])
    class Add(nn.Module):
        def forward(self, x: Tensor, kept: Tensor) -> Tensor:
            return x + kept

    first, second = nn.Sequential(Keep(), nn.Tanh()), nn.Sequential(nn.ReLU(), Add())
    piped = pipe(nn.Sequential(first, second), [1, 1])

    assert torch.equal(piped(rows()), rows().tanh().relu() + rows())
    assert list(piped.skip_layout().columns[2].cells) == ["layer 3"]


def test_plan_by_children() -> None:
    found = plan(groups(), rows(), 2, device="meta", balance=[1, 2])

    assert list(found.settings.balance) == [2, 4]
