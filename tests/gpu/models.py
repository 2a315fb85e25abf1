"""A module in float64 whose numbers are the same on every device, and devices to cut it over.

Two workers on one device are two threads that share a stream; a stage on the CPU beside one on the
GPU makes every hand-over a copy. Both need one GPU only; two or four are used if they are there.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import GPipe

GPU = "cuda:0"
WIDTH = 32
ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICES = [
    pytest.param([GPU], id="one-worker"),
    pytest.param([GPU] * 2, id="two-workers"),
    pytest.param(["cpu", GPU], id="from-cpu"),
    pytest.param([GPU, "cpu"], id="to-cpu"),
    pytest.param([GPU, "cpu", GPU], id="there-and-back"),
    pytest.param(
        [GPU, "cuda:1"],
        id="two-gpus",
        marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    ),
    pytest.param(
        ["cuda:2", GPU, "cuda:3", "cuda:1"],
        id="four-gpus",
        marks=pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs"),
    ),
]


def layers(*between: nn.Module) -> nn.Sequential:
    """Layers in float64 on the CPU, always with the same weights."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, WIDTH),
        nn.Tanh(),
        *between,
        nn.Linear(WIDTH, WIDTH),
        nn.LayerNorm(WIDTH),
        nn.ReLU(inplace=True),
        nn.Linear(WIDTH, 4),
    ).double()


def batch(rows: int = 13, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 8, dtype=torch.float64, generator=generator)


def on_host(*layers: nn.Module, chunks: int = 2, **options: Any) -> GPipe:
    """A pipeline on one GPU with a stage for each layer, whose weights are on the host."""
    return GPipe(
        nn.Sequential(*layers),
        [1] * len(layers),
        devices=[GPU],
        chunks=chunks,
        weights="host",
        **options,
    )


def gradients(module: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    assert len(found) == len(list(module.parameters())), "a parameter has no gradient"
    return {name: gradient.clone() for name, gradient in found.items()}


def assert_same(found: Any, expected: Any) -> None:
    # 1e-9: float64, sums in another order.
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11, check_device=False)
