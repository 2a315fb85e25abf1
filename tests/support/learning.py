"""Optimizers, and a few steps with them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.models import rows, step

Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1, weight_decay=0.01),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
}
on_every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def learn(module: nn.Module, make: Make, *, steps: int = 4) -> None:
    """Take steps with a new optimizer."""
    optimizer = make(module.parameters())
    for seed in range(steps):
        optimizer.zero_grad()
        step(module, rows(7, seed=seed).detach())
        optimizer.step()
