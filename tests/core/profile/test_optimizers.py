"""The bytes that an optimizer keeps."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, Adam, AdamW

from lightning_gpipe.core.profile.optimizers import optimizer_bytes


def bytes_with(optimizer: Any) -> list[int]:
    layer = nn.Linear(4, 8)
    found = optimizer_bytes(layer.parameters(), optimizer)
    return [found.get(id(p), 0) for p in layer.parameters()]


@pytest.mark.parametrize(
    "optimizer, expected",
    [
        (None, [0, 0]),
        (partial(SGD, lr=0.1), [0, 0]),
        (partial(SGD, lr=0.1, momentum=0.9), [128, 32]),
        (Adam, [2 * 128 + 4, 2 * 32 + 4]),
        (AdamW, [2 * 128 + 4, 2 * 32 + 4]),
        (partial(Adam, amsgrad=True), [3 * 128 + 4, 3 * 32 + 4]),
        (Adafactor, [(8 + 4) * 4 + 4, 32 + 4]),
    ],
)
def test_state_of_an_optimizer(optimizer: Any, expected: list[int]) -> None:
    assert bytes_with(optimizer) == expected


def test_optimizers_that_exist_are_not_stepped() -> None:
    layer = nn.Linear(4, 8)
    first = SGD([layer.weight], lr=0.1, momentum=0.9)
    second = Adam([{"params": [layer.bias], "lr": 0.1}], fused=True)
    schedule = torch.optim.lr_scheduler.StepLR(first, 1)  # it counts the steps
    before = layer.weight.clone()

    found = optimizer_bytes(layer.parameters(), [first, second])

    assert [found[id(p)] for p in layer.parameters()] == [128, 68]
    assert torch.equal(layer.weight, before) and not first.state and not second.state
    assert schedule.last_epoch == 0


def test_frozen_parameters_have_no_state() -> None:
    layer = nn.Linear(4, 8).requires_grad_(False)

    assert optimizer_bytes(layer.parameters(), Adam) == {}


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match="optimizer must be an optimizer.*got 'adam'"):
        bytes_with("adam")


def test_optimizer_that_looks_at_values_makes_a_step_on_zeros() -> None:
    class Peeks(SGD):
        def step(self, closure: Any = None) -> Any:
            assert self.param_groups[0]["params"][0].sum().item() == 0
            return super().step(closure)

    assert bytes_with(partial(Peeks, lr=0.1, momentum=0.9)) == [128, 32]


def test_optimizer_that_makes_no_step_is_refused() -> None:
    class Stubborn(SGD):
        def step(self, closure: Any = None) -> Any:
            raise NotImplementedError("not alone")

    with pytest.raises(ValueError, match="NotImplementedError: not alone. Pass another one"):
        bytes_with(partial(Stubborn, lr=0.1))
