"""Plain attributes of modules, and the objects in them, are listed once and by full name."""

from __future__ import annotations

import logging
import random
from collections import deque
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe.core.layout.module_attributes import (
    attributes_in,
    holders,
    is_generator,
    is_user_object,
    parameter_holders,
    tensors_within,
    with_tensors,
    within,
)


class Meter:
    """An object of a user's class."""

    def __init__(self) -> None:
        self.count = 0
        self.seen: list[int] = []


class Counted(nn.Module):
    """Has attributes that are neither parameters, buffers nor modules."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.linear = nn.Identity()
        self.scale = nn.Parameter(torch.ones(1))
        self.steps = 3
        self.meter = meter


@dataclass(frozen=True, slots=True)
class FrozenPair:
    """An object that may not be written to."""

    one: int
    other: int


class WithSlots:
    """An object without a dict of attributes."""

    __slots__ = ("value",)


def test_attributes_by_full_name() -> None:
    meter = Meter()

    found = dict(attributes_in(nn.Sequential(Counted(meter))))

    assert found == {"0.steps": 3, "0.meter": meter, "0.meter.count": 0, "0.meter.seen": []}


def test_object_that_modules_share_is_listed_with_the_first() -> None:
    meter = Meter()
    one, other = Counted(meter), Counted(meter)

    found = [(holder.module, holder.prefix) for holder in holders([one, other])]

    assert found == [(one, ""), (one, "meter."), (other, "")]


class Slotted:
    """An object of a user's class with slots; the second one has no value."""

    __slots__ = ("inner", "missing")

    def __init__(self, inner: Any) -> None:
        self.inner = inner


def test_objects_in_objects_and_with_slots() -> None:
    meter = Meter()
    module = Counted(meter)
    meter.seen = [Slotted(Meter())]  # type: ignore[list-item]

    *_, slotted, inner = holders([module], deep=True)

    assert [holder.prefix for holder in holders([module])] == ["", "meter."]
    assert slotted.prefix == "meter.seen[0]."
    assert inner.prefix == "meter.seen[0].inner."
    assert dict(slotted.slots) == {"inner": meter.seen[0].inner}  # type: ignore[attr-defined]


def test_slots_are_written_and_emptied() -> None:
    module = Counted(Meter())
    module.meter = frozen = FrozenPair(1, 2)  # type: ignore[assignment]
    *_, holder = holders([module], deep=True)

    holder.slots["one"] = 3
    del holder.slots["other"]

    assert frozen.one == 3
    assert (len(holder.slots), dict(holder.slots)) == (1, {"one": 3})


def test_parameters_with_attributes() -> None:
    one, other = Counted(Meter()), Counted(Meter())
    vars(one.scale)["zero_point"] = 7
    other.scale = one.scale

    [holder] = parameter_holders([one, other, nn.Linear(1, 1)])

    assert (holder.module, holder.prefix, holder.held) == (one, "scale.", {"zero_point": 7})


def test_everything_within_containers_once() -> None:
    shared = [object(), "text", 1]
    value = {"one": shared, 2: (shared, {shared[0]})}

    found = list(within(value))

    assert sorted(type(x).__name__ for x in found) == ["dict", "list", "object", "set", "tuple"]


def test_container_within_itself() -> None:
    loop: list[Any] = []
    loop.append(loop)

    assert list(within(loop)) == [loop]


def test_elements_of_large_containers_are_left_out() -> None:
    large = [object(), object(), object()]

    assert [id(x) for x in within([large], largest=2)][1:] == [id(large)]


@pytest.mark.parametrize(
    "value", [torch.Generator(), random.Random(), np.random.default_rng(), np.random.RandomState()]
)
def test_generators(value: Any) -> None:
    assert is_generator(value)
    assert not is_user_object(value)


@pytest.mark.parametrize(
    "value",
    [
        *(nn.Identity(), torch.ones(1), [], {}, 3, Meter, WithSlots()),
        *(print, partial(print), logging, logging.getLogger("of the user")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_values_are_no_objects_of_the_user(value: Any) -> None:
    assert not is_user_object(value)


def test_objects_of_the_user() -> None:
    assert is_user_object(Meter())


class Pair(NamedTuple):
    one: Any
    other: Any


def test_other_tensors_in_copies_of_what_holds_them() -> None:
    one, other, meter, module = torch.ones(1), torch.zeros(1), Meter(), nn.Linear(1, 1)
    state, empty = SimpleNamespace(absmax=one, module=module), SimpleNamespace(name="nf4")
    value = {
        "all": [one, (other, 2), Pair(one, 3), {other}, deque([one])],
        "state": state,
        "empty": empty,
        "meter": meter,
    }

    found = with_tensors(value, lambda tensor: tensor + 1)

    first, pair, named, bag, line = found["all"]
    assert [first.item(), pair[0].item(), named.one.item()] == [2, 1, 2]
    assert [type(x) for x in found["all"]] == [Tensor, tuple, Pair, set, deque]
    assert pair[1:] == (2,)
    assert named.other == 3
    assert [*bag] == [pair[0]]
    assert first is named.one is line[0] is found["state"].absmax
    # What holds no tensor is the very object, and so is a module.
    assert found["meter"] is meter
    assert found["empty"] is empty
    assert found["state"].module is module
    # The value itself is as before.
    assert {id(x) for x in tensors_within(value)} == {id(one), id(other)}


def test_other_tensors_in_objects_that_lead_back() -> None:
    state = SimpleNamespace(scale=torch.ones(1))
    state.itself = [state]

    found = with_tensors(state, torch.neg)

    assert found is not state
    assert found.itself[0] is found
    assert found.scale.item() == -1
    assert state.itself[0] is state


def test_value_without_tensors_is_not_copied() -> None:
    value = {"kind": "nf4", "sizes": [2, 3]}

    assert with_tensors(value, torch.neg) is value
