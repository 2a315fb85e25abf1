"""Plugins and accelerators that are for other strategies or devices are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import (
    DeepSpeedPrecision,
    FSDPPrecision,
    Precision,
    TorchSyncBatchNorm,
    TransformerEnginePrecision,
    XLAPrecision,
)

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.strategy.refusals import check_environment
from tests.support.lightning_modules import fitted


@pytest.mark.parametrize("kind", ["xla", "mps"])
def test_accelerator_of_other_devices(kind: str) -> None:
    with pytest.raises(
        ValueError, match=rf"accelerator='cpu'.*accelerator='gpu'.*got \['{kind}'\]"
    ):
        check_environment([torch.device(kind, 0)], None, Precision())


def test_layer_sync(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="makes batch norms wait for those of other processes"):
        fitted(tmp_path, GPipeStrategy([3, 3]), devices=2, plugins=[TorchSyncBatchNorm()])


@pytest.mark.parametrize("kind", [DeepSpeedPrecision, FSDPPrecision])
def test_precision_of_another_strategy(tmp_path: Path, kind: Any) -> None:
    with pytest.raises(ValueError, match=f"{kind.__name__} is for .*Write Trainer.precision="):
        fitted(tmp_path, GPipeStrategy([3, 3]), devices=2, plugins=[kind("bf16-mixed")])


@pytest.mark.parametrize("kind", [TransformerEnginePrecision, XLAPrecision])
def test_precision_that_needs_other_packages(kind: type[Precision]) -> None:
    plugin = kind.__new__(kind)  # as if its package were installed

    with pytest.raises(ValueError, match=f"{kind.__name__} is for .*Write Trainer.precision="):
        check_environment([], None, plugin)
