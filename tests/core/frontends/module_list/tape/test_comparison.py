"""Arguments are the same as the recorded ones in every leaf and container, or they differ."""

from __future__ import annotations

import copy
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe.core.frontends.module_list.tape.calls import TensorLeaf
from lightning_gpipe.core.frontends.module_list.tape.comparison import OutsideTensor, same_arguments
from lightning_gpipe.core.frontends.module_list.tape.placeholder import Placeholder
from lightning_gpipe.core.programs import Value

Pair = namedtuple("Pair", "one other")

EXPECTED = OutsideTensor(4, 4, 1, None, torch.float32, 2)


class Outsides:
    """Accepts one tensor, and takes those of two dims."""

    def __init__(self) -> None:
        self.accepted: dict[Any, Tensor] = {}
        self.asked = 0

    def is_as(self, tensor: Tensor, expected: OutsideTensor) -> bool:
        self.asked += 1
        return expected.fits(tensor)


class Recording:
    """What placeholders belong to."""

    device, grad = torch.device("cpu"), True

    def __init__(self) -> None:
        self.outsides = Outsides()


def placeholder(recording: Any, number: int) -> Placeholder:
    return Placeholder(recording, number, TensorLeaf(torch.float32, 2, 1))


@pytest.mark.parametrize("tree", [(), {}, (1, "a", None), {"k": [1.5, (True,)]}, (Pair(1, 2),)])
def test_constants_in_containers(tree: Any) -> None:
    assert same_arguments(tree, copy.deepcopy(tree), Recording())


@pytest.mark.parametrize(
    "tree, given",
    [
        ((), []),
        ((), (1,)),
        ({}, {"k": 1}),
        ({}, ()),
        ((1,), (2,)),
        ((1,), (True,)),
        ((1,), (1.0,)),
        ((1,), [1]),
        ((None,), (0,)),
        (([],), ([1],)),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, {"a": 1, "b": 1}),
        ((Pair(1, 2),), ((1, 2),)),
        ((object(),), (object(),)),
        ((Value(3),), (3,)),
        ((EXPECTED,), (None,)),
    ],
)
def test_what_differs(tree: Any, given: Any) -> None:
    assert not same_arguments(tree, given, Recording())


def test_placeholder_of_the_number_and_of_the_same_recording() -> None:
    mine, other = Recording(), Recording()
    expected = (Value(3),)

    assert same_arguments(expected, (placeholder(mine, 3),), mine)
    assert not same_arguments(expected, (placeholder(mine, 2),), mine)
    assert not same_arguments(expected, (placeholder(other, 3),), mine)
    assert not same_arguments(expected, (torch.zeros(2, 2),), mine)
    assert not same_arguments((EXPECTED,), (placeholder(mine, 4),), mine)
    assert not same_arguments((7,), (placeholder(mine, 4),), mine)


def test_tensor_from_outside_is_asked_about_until_it_is_accepted() -> None:
    recording = Recording()
    expected, given = {"mask": EXPECTED}, {"mask": torch.zeros(2, 2)}
    assert same_arguments(expected, given, recording)
    assert recording.outsides.asked == 1

    recording.outsides.accepted[EXPECTED.key] = given["mask"]
    assert same_arguments(expected, given, recording)
    assert recording.outsides.asked == 1

    assert same_arguments(expected, {"mask": torch.zeros(2, 2)}, recording)
    assert same_arguments(expected, {"mask": nn.Parameter(torch.zeros(2, 2))}, recording)
    assert not same_arguments(expected, {"mask": torch.zeros(2)}, recording)
    assert not same_arguments(expected, {"mask": torch.zeros(2, 2, dtype=torch.float64)}, recording)
    assert recording.outsides.asked == 5
