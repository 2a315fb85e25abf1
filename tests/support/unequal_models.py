"""Layers on which verify() finds a difference, and what it reports."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_gpipe import GPipe, verify
from lightning_gpipe.core.verify.parity import Parity
from tests.support.models import Call, rows

W = 3  # the width of all layers
Layers = list[nn.Module]


def sequential(*layers: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """The layers in a row, in ``dtype``."""
    return nn.Sequential(*layers).to(dtype)


def verified(
    *layers: nn.Module,
    batch: Any = None,
    dtype: torch.dtype = torch.float64,
    balance: list[int] | None = None,
    **options: Any,
) -> Parity:
    """What verify() finds on two stages, the first of one layer, for 3, 2 and 2 rows."""
    cut = [1, len(layers) - 1] if balance is None else balance
    defaults: dict[str, Any] = {"devices": ["cpu"] * len(cut), "chunks": 3}
    pipeline = GPipe(sequential(*layers, dtype=dtype), cut, **(defaults | options))
    try:
        return verify(pipeline, rows(7) if batch is None else batch)
    finally:
        pipeline.close()


def linear() -> nn.Module:
    """A layer of the width of all."""
    return nn.Linear(W, W)


def counted(x: Tensor) -> tuple[Tensor, int, Tensor]:
    """The rows, how many there are, and their numbers."""
    return x, x.size(0), torch.arange(x.size(0))


def sequences() -> Tensor:
    """Seven sequences of four steps."""
    return torch.randn(7, 4, W, dtype=torch.float64, requires_grad=True)


class Recurrent(nn.Module):
    """An LSTM of two layers with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(W, W, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class Coarse(nn.Module):
    """Drops precision for few rows."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.size(0) > 4 else x.bfloat16().to(x.dtype)


def functional_dropout() -> nn.Module:
    """A dropout that no module of torch stands for."""
    return Call(lambda x: F.dropout(x, 0.5))
