"""Trainers on several GPUs, and on one GPU without a pipeline to compare them with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import GPipeStrategy
from tests.support.lightning_modules import FEATURES, WIDTH, Classifier, fitted

Build = Callable[[], L.LightningModule]
DEPTH = 4  # of the Linear layers; with as many Tanh


def needs(gpus: int) -> list[pytest.MarkDecorator]:
    """The marks of a test for this many GPUs."""
    too_few = torch.cuda.device_count() < gpus
    return [pytest.mark.gpu, pytest.mark.skipif(too_few, reason=f"needs {gpus} GPUs")]


MANY = min(4, torch.cuda.device_count())
on_two_and_many_gpus = pytest.mark.parametrize(
    "gpus", [pytest.param(n, marks=needs(2), id=f"{n}-gpus") for n in sorted({2, max(2, MANY)})]
)
on_many_gpus = pytest.mark.parametrize("gpus", [pytest.param(MANY, marks=needs(2), id="gpus")])


def eight_layers() -> nn.Sequential:
    """Enough layers for four GPUs."""
    widths = [FEATURES, *[WIDTH] * DEPTH]
    pairs = [[nn.Linear(widths[k], WIDTH), nn.Tanh()] for k in range(DEPTH)]
    return nn.Sequential(*(layer for pair in pairs for layer in pair))


class Deep(Classifier):
    """A :class:`Classifier` of eight layers."""

    def __init__(self, optimizer: str = "momentum", scheduled: bool = False) -> None:
        super().__init__(optimizer, scheduled, layers=eight_layers())


def plain(root: Path, build: Build = Deep, **options: Any) -> L.Trainer:
    """A Trainer after a fit on one GPU."""
    return fitted(root, build=build, accelerator="gpu", devices=1, **options)


def piped(
    root: Path, devices: int | list[int], chunks: int = 3, build: Build = Deep, **options: Any
) -> L.Trainer:
    """A Trainer after a fit in a pipeline over ``devices``, with one stage on each."""
    strategy = GPipeStrategy(chunks=chunks)
    return fitted(root, strategy, build=build, accelerator="gpu", devices=devices, **options)


def places(module: nn.Module) -> dict[str, torch.device]:
    """The device of each parameter and buffer, by name."""
    return {name: tensor.device for name, tensor in module.state_dict().items()}


def devices_in(value: Any) -> set[str]:
    """The devices of all tensors in a nested value."""
    if isinstance(value, Tensor):
        return {str(value.device)}
    items = value.values() if isinstance(value, dict) else value
    nested = isinstance(value, dict | list | tuple)
    return set().union(*map(devices_in, items)) if nested else set()
