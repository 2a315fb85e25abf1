"""State dicts are loaded into models of which some tensors have no values in this process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe.checkpoints import load_state
from lightning_gpipe.core.frontends import forget_values


class Scaled(nn.Linear):
    """Has a number that is no tensor in its state."""

    factor = 1.0

    def get_extra_state(self) -> dict[str, float]:
        return {"factor": self.factor}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.factor = state["factor"]


def model() -> Any:
    return nn.Sequential(Scaled(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2, bias=False))


def halves() -> tuple[Any, dict[str, Any]]:
    """A model whose first layers have values in another process, and the values of another one."""
    other = model()
    other[0].factor = 5.0
    nn.init.uniform_(other[1].running_mean)
    module = model()
    for tensor in (*module[0].parameters(), *module[1].parameters(), *module[1].buffers()):
        forget_values(tensor)
    return module, other.state_dict()


def test_tensors_stay_the_same_objects() -> None:
    """Once all of them were replaced, also those with values, so hooks and attributes were lost."""
    module, state = halves()
    before = [*module.parameters(), *module.buffers()]
    seen: list[Tensor] = []
    for parameter in module.parameters():
        parameter.register_hook(seen.append)

    load_state(module, state, strict=True)

    assert all(map(lambda one, two: one is two, before, [*module.parameters(), *module.buffers()]))
    assert all(torch.equal(x, state[name]) for name, x in module.named_parameters())
    assert all(torch.equal(x, state[name]) for name, x in module.named_buffers())
    module(torch.ones(3, 2)).sum().backward()
    assert len(seen) == len(list(module.parameters()))


def test_state_that_is_no_tensor() -> None:
    """Once it was asked for its dtype: an AttributeError."""
    module, state = halves()

    load_state(module, state, strict=True)

    layer = module[0]
    assert isinstance(layer, Scaled) and layer.factor == 5.0


def test_values_are_cast_and_tied_parameters_stay_tied() -> None:
    module: Any = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)).double()
    module[1].weight = module[0].weight
    forget_values(module[0].weight)
    value = torch.rand(2, 2)

    load_state(module, {"0.weight": value, "1.weight": value}, strict=True)

    assert module[0].weight is module[1].weight
    assert torch.equal(module[0].weight, value.double())


def test_values_that_are_tied_in_the_checkpoint_alone_get_memory_of_their_own() -> None:
    module: Any = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    for parameter in module.parameters():
        forget_values(parameter)
    value = torch.rand(2, 2)
    before = value.clone()

    load_state(module, {"0.weight": value, "1.weight": value}, strict=True)

    with torch.no_grad():
        module[0].weight.zero_()
    assert torch.equal(module[1].weight, before)


def test_value_of_another_shape_is_refused() -> None:
    module, state = halves()

    with pytest.raises(RuntimeError, match="size mismatch for 0.weight"):
        load_state(module, {**state, "0.weight": torch.ones(3, 2)}, strict=True)
