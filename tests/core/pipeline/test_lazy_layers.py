"""Nothing silent: lazy layers are refused by name, and run once they are initialised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import (
    GPipe,
    balance_by_memory,
    balance_by_parameters,
    balance_by_time,
    plan,
    profile,
)
from tests.support.models import assert_same_step, rows
from tests.support.pipes import Pipe, every_mode

pytestmark = pytest.mark.filterwarnings(
    "ignore:Lazy modules are a new"
)  # torch, nn/modules/lazy.py


class Looped(nn.Module):
    """Loops over blocks of which one is lazy."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 3), nn.LazyLinear(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Traced(nn.Module):
    """Calls a lazy layer between two others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(3, 3), nn.LazyLinear(3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(self.middle(self.first(x)))


def sequential() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(3), nn.Tanh())


def refused(run: Callable[[], object]) -> str:
    with pytest.raises(ValueError, match="must be initialised before a pipeline is made") as error:
        run()
    message = str(error.value)
    assert message.endswith("write self(torch.zeros(2, ...)) at the end of __init__.")
    return message


MODELS = {
    "Sequential": (sequential, "1"),
    "ModuleList": (Looped, "blocks.1"),
    "traced": (Traced, "middle"),
    "buffers": (lambda: nn.Sequential(nn.Tanh(), nn.LazyBatchNorm1d(affine=False)), "1"),
    "itself": (lambda: nn.LazyLinear(3), "LazyLinear"),
}


@pytest.mark.parametrize("balance", [[1, 1], "parameters", "time"])
@pytest.mark.parametrize("kind", MODELS)
def test_lazy_layers_of_a_pipeline(kind: str, balance: Any) -> None:
    build, name = MODELS[kind]

    message = refused(lambda: GPipe(build(), balance, devices=["cpu"] * 2, sample=rows(4)))

    assert f": got lazy ones in {name}. Call" in message


@pytest.mark.parametrize(
    "run",
    [
        lambda module: profile(module, rows(4)),
        lambda module: plan(module, rows(4), 2),
        lambda module: balance_by_parameters(module, 2),
        lambda module: balance_by_time(module, 2, rows(4)),
        lambda module: balance_by_memory(module, 2, rows(4)),
    ],
    ids=["profile", "plan", "parameters", "time", "memory"],
)
def test_lazy_layers_that_are_measured(run: Callable[[nn.Module], object]) -> None:
    refused(lambda: run(sequential()))


@every_mode
@pytest.mark.parametrize(
    "build, balance", [(sequential, [1, 2]), (Looped, [1, 1]), (Traced, [1, 2])]
)
def test_layers_that_were_lazy(
    pipe: Pipe, build: Callable[[], nn.Module], balance: list[int]
) -> None:
    plain: Any = build().double()
    with torch.no_grad():
        plain(rows(2))

    assert_same_step(pipe(plain, balance), plain, rows(7))
