"""Layers that take time by a clock that stands still otherwise."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe.core.profile import meters


class Clock:
    """Time as layers let it go by."""

    def __init__(self) -> None:
        self.now = 0.0

    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    def replace(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Measure layers by this clock."""
        monkeypatch.setattr(meters, "time", SimpleNamespace(perf_counter=lambda: self.now))


class _Taking(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Takes) -> Tensor:
        ctx.layer = layer
        layer.pass_time(layer.forward_time, len(x))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.layer.pass_time(ctx.layer.backward_time, len(gradient))
        return gradient, None


class Takes(nn.Module):
    """Returns its input, and takes some time for it.

    Args:
        clock: The clock.
        forward_time: The seconds of a forward, for each row.
        backward_time: The seconds of a backward, for each row.
        fixed: The seconds of both, whatever the number of rows.
        width: The number of its parameters.
    """

    def __init__(
        self,
        clock: Clock,
        forward_time: float,
        backward_time: float = 0.0,
        *,
        fixed: float = 0.0,
        width: int = 1,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.forward_time, self.backward_time = forward_time, backward_time
        self._pass_time, self._fixed = clock.pass_time, fixed

    def pass_time(self, per_row: float, rows: int) -> None:
        self._pass_time(self._fixed + per_row * rows)

    def forward(self, x: Tensor) -> Tensor:
        return _Taking.apply(x * self.weight[0], self)


class Between(nn.Module):
    """Calls children one after another, as a forward that must be traced does."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        for k, layer in enumerate(layers):
            self.add_module(f"layer{k}", layer)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = layer(x)
        return x


class Looped(nn.Module):
    """Loops over blocks, with layers around them."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(blocks)
        self.leave = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)
