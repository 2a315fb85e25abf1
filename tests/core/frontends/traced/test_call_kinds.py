"""Calls of one kind have tensors in the same places, and equal values everywhere else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_gpipe import whole
from lightning_gpipe.core.frontends.traced.call_kinds import CallKind, check_constants

X = torch.ones(4, 2)


def kind(*args: Any, **kwargs: Any) -> CallKind:
    found, _ = CallKind.of(args, kwargs)
    return found


def test_other_tensors_are_of_the_same_kind() -> None:
    one, other = kind(X, mask=[X, None]), kind(torch.zeros(9), mask=[X > 0, None])

    assert one == other
    assert hash(one) == hash(other)


@pytest.mark.parametrize(
    "other",
    [
        kind(X, 1.0),
        kind(X, True),
        kind(X, X),
        kind(X, None),
        kind(X, (1,)),
        kind(X, scale=1),
        kind(whole(X), 1),
    ],
    ids=["a float", "a bool", "a tensor", "None", "in a tuple", "by its name", "whole"],
)
def test_other_constants_are_of_another_kind(other: CallKind) -> None:
    assert kind(X, 1) == kind(X, 1)
    assert kind(X, 1) != other


def test_values_take_the_places_of_the_tensors() -> None:
    found, tensors = CallKind.of((X, {"mask": X > 0}), {"scale": 2})

    def forward(x: Any, masks: Any, scale: int) -> Any:
        return x, masks, scale

    assert [x.dtype for x in tensors] == [torch.float32, torch.bool]
    assert found.call(forward, ["x", "mask"]) == ("x", {"mask": "mask"}, 2)


def test_required_arguments_of_a_forward() -> None:
    def forward(x: Tensor, names: list[str], y: Any = None, *, mask: Tensor) -> None: ...

    found = CallKind.required(forward)

    assert [argument.kind.name for argument in found.inputs] == ["TENSOR", "UNKNOWN", "TENSOR"]
    assert not any(argument.certain for argument in found.inputs)


@pytest.mark.parametrize("value", [[1, 2, 3, 4], np.arange(4), ("a", "b", "c", "d")], ids=str)
def test_entry_for_each_row_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"an entry for each of the 4 rows as argument 'names'"):
        check_constants((X,), {"names": value}, [X])


@pytest.mark.parametrize("value", [[1, 2], (1, 2, 3, 4), whole([1, 2, 3, 4])], ids=str)
def test_other_lists_are_constants(value: Any) -> None:
    check_constants((X,), {"names": value}, [X])
