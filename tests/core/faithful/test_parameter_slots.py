"""The slots of a module, in which layers find a shadow, and the caller's code its parameter."""

import pickle
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import nn

from lightning_gpipe.core.faithful.parameter_slots import Parameters, ParameterSlots

Read = Callable[[Parameters], nn.Parameter | None]

READS: dict[str, Read] = {
    "by name": lambda slots: slots["weight"],
    "get": lambda slots: slots.get("weight"),
    "items": lambda slots: dict(slots.items())["weight"],
    "values": lambda slots: next(iter(slots.values())),
}


class Sides:
    """A weight that is hidden by a shadow, and a bias that is not.

    Attributes:
        own: The slots of the module.
        slots: Those while the shadow is there.
    """

    def __init__(self) -> None:
        self.own: Parameters = {"weight": new(), "bias": new()}
        self.weight, self.shadow = self.own["weight"], new()
        self._by_caller = False
        self.slots = ParameterSlots(self.own, lambda: self._by_caller)
        self.slots.hide("weight", self.shadow)

    def caller(self) -> ParameterSlots:
        """The slots as the caller's code uses them."""
        self._by_caller = True
        return self.slots

    def layer(self) -> ParameterSlots:
        """The slots as layers use them."""
        self._by_caller = False
        return self.slots


def new() -> nn.Parameter:
    return nn.Parameter(torch.zeros(1))


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_each_finds_its_own(read: Read) -> None:
    sides = Sides()

    assert read(sides.caller()) is sides.weight
    assert read(sides.layer()) is sides.shadow
    assert sides.own["weight"] is sides.weight


def test_parameter_that_the_caller_replaces() -> None:
    """Layers go on with the shadow, of which the gradient is known."""
    sides, weight, bias = Sides(), new(), new()

    sides.caller()["weight"] = weight
    sides.caller()["bias"] = bias

    assert sides.caller()["weight"] is sides.own["weight"] is weight
    assert sides.caller()["bias"] is sides.own["bias"] is bias
    assert sides.layer()["weight"] is sides.shadow
    assert sides.layer()["bias"] is bias


def test_parameter_that_a_layer_replaces() -> None:
    """As torch.func.functional_call does, which puts the shadow back."""
    sides, weight, bias = Sides(), new(), new()

    sides.layer()["weight"] = weight
    sides.layer()["bias"] = bias

    assert sides.layer()["weight"] is weight
    assert sides.caller()["weight"] is sides.own["weight"] is sides.weight
    assert sides.layer()["bias"] is sides.caller()["bias"] is sides.own["bias"] is bias


@pytest.mark.parametrize("copy", [deepcopy, lambda slots: pickle.loads(pickle.dumps(slots))])
def test_copy_is_of_the_parameters(copy: Callable[[Parameters], Parameters]) -> None:
    sides = Sides()
    with torch.no_grad():
        sides.shadow.fill_(1)

    copied = copy(sides.caller())

    assert type(copied) is dict
    assert copied == {"weight": new(), "bias": new()}
