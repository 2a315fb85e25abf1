"""Copies of weights that are more than their values; aliases are in test_shadow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from lightning_gpipe.core.faithful.parameter_leaves import (
    copy_like,
    hollow_copy,
    leaf_like,
    parts_of,
    placeholder,
    value_on,
)
from tests.support.quantised import Composed, scaled

CPU, META = torch.device("cpu"), torch.device("meta")


def composed() -> Any:
    return nn.Parameter(
        Composed(torch.ones(3, 2, dtype=torch.int8), torch.ones(3, 1)), requires_grad=False
    )


def with_state() -> Any:
    """A weight with an object of scales, as in 4 bits, and its layer in an attribute."""
    weight: Any = scaled(torch.randn(3, 2))
    weight.state = SimpleNamespace(absmax=torch.ones(3), nested=[torch.ones(1)], name="nf4")
    weight.module = nn.Linear(1, 1)
    return weight


def test_parts_of_weights() -> None:
    plain: Any = nn.Parameter(torch.ones(2))
    plain.mark = torch.ones(2)
    state: Any = with_state()
    two: Any = nn.Parameter(TwoTensor(torch.ones(2), torch.zeros(2)))
    nested: Any = nn.Parameter(TwoTensor(two.detach(), TwoTensor(torch.ones(2), torch.ones(2))))

    assert [*map(id, parts_of(plain))] == [id(plain)]
    assert id(parts_of(state)[0]) == id(state)
    beside = {id(x) for x in (state.scale, state.state.absmax, *state.state.nested)}
    assert {id(part) for part in parts_of(state)[1:]} == beside
    assert [*map(id, parts_of(two))] == [id(two.a), id(two.b)]
    assert len(parts_of(nested)) == 4


def test_weight_that_holds_itself() -> None:
    weight = with_state()
    weight.state.itself = weight

    leaf, parts = hollow_copy(weight, False, META)

    assert vars(leaf)["state"].itself is leaf
    assert parts[0].at_home is weight


@pytest.mark.parametrize("hollow", [False, True])
def test_copy_has_its_attributes_on_the_device(hollow: bool) -> None:
    weight = with_state()
    state = weight.state

    copy: Any = hollow_copy(weight, False, META)[0] if hollow else copy_like(weight, False, META)

    assert type(copy) is type(weight)
    assert copy.is_meta
    assert {x.device for x in (copy.scale, copy.state.absmax, *copy.state.nested)} == {META}
    assert copy.state.name == "nf4"
    assert copy.module is weight.module
    # The weight itself is as before.
    assert weight.state is state
    assert {part.device for part in parts_of(weight)} == {CPU}


def test_attributes_that_are_on_the_device_are_shared() -> None:
    weight = with_state()

    assert vars(copy_like(weight, False, CPU)) is vars(weight)


def test_mark_on_a_plain_parameter_is_not_copied() -> None:
    weight = nn.Parameter(torch.ones(2))
    vars(weight)["mark"] = torch.ones(2)

    copy = copy_like(weight, True, META)

    assert copy.is_meta
    assert vars(copy) is vars(weight)


class Untouched(nn.Parameter):
    """A parameter whose class defines operators for its layer."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


def test_values_are_copied_by_plain_operators() -> None:
    weight = Untouched(torch.ones(2))

    assert torch.equal(value_on(weight, CPU), torch.ones(2))


def test_attributes_elsewhere_stay_there() -> None:
    weight = with_state()
    weight.state.absmax = torch.ones(3, device=META)

    leaf, parts = hollow_copy(weight, False, CPU)

    assert vars(leaf)["state"].absmax is weight.state.absmax
    assert weight.state.absmax not in [part.at_home for part in parts if part.at_home.is_meta]


def test_copy_of_a_weight_made_of_tensors_has_parts_with_placeholders() -> None:
    weight = composed()
    weight.mark, weight.count = torch.ones(1), 3

    copy: Any
    copy, parts = hollow_copy(weight, False, CPU)

    assert [type(copy), copy._is_param, copy.count] == [Composed, True, 3]
    homes = [*map(id, parts_of(weight))]
    assert [id(part.at_home) for part in parts] == homes[: len(parts)]
    assert {id(part.copy) for part in parts} >= {id(copy.integers), id(copy.scale)}
    assert copy.integers.untyped_storage().nbytes() == 1
    assert copy.integers.shape == (3, 2)
    assert copy.scale.isnan().all()
    assert weight.scale.eq(1).all()


def test_trained_weight_made_of_tensors() -> None:
    weight = nn.Parameter(TwoTensor(torch.ones(2), torch.ones(2)))

    leaf, parts = hollow_copy(weight, True, CPU)
    for part in parts:
        part.copy.data = part.at_home.clone()
    leaf.sum().backward()

    assert leaf.is_leaf
    assert isinstance(leaf.grad, TwoTensor)
    assert weight.grad is None


def test_plain_weight_has_one_part_and_shares_its_attributes() -> None:
    weight: Any = nn.Parameter(torch.ones(2))
    weight.mark = torch.ones(1)

    leaf, [part] = hollow_copy(weight, True, CPU)

    assert (part.weight, part.at_home, part.copy) == (weight, weight, leaf)
    assert vars(leaf) is vars(weight)
    assert leaf.isnan().all()


def test_leaf_of_other_values() -> None:
    weight = with_state()

    leaf = leaf_like(weight, False, torch.zeros(3, 2, dtype=torch.int8))

    assert type(leaf) is type(weight)
    assert not leaf.any()
    assert vars(leaf) is vars(weight)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int8, torch.uint8, torch.float8_e4m3fn]
)
def test_placeholder_has_one_element(dtype: torch.dtype) -> None:
    weight = torch.ones(3, 2).to(dtype)

    made: Tensor = placeholder(weight, CPU)

    assert (made.shape, made.dtype) == (weight.shape, dtype)
    assert made.untyped_storage().nbytes() == dtype.itemsize
    assert made.float().isnan().all() == (dtype.itemsize > 1)
