"""Plain attributes of modules, and the objects in them, are listed once and by full name."""

from __future__ import annotations

import logging
import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_gpipe.core.layout.module_attributes import (
    attributes_in,
    holders,
    is_generator,
    is_user_object,
    parameter_holders,
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
