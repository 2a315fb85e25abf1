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
from lightning.pytorch.plugins.layer_sync import LayerSync

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.strategy.refusals import check_environment, check_synchronised
from tests.support.lightning_modules import fitted


@pytest.mark.parametrize("kind", ["xla", "mps"])
def test_accelerator_of_other_devices(kind: str) -> None:
    with pytest.raises(
        ValueError, match=rf"accelerator='cpu'.*accelerator='gpu'.*got \['{kind}'\]"
    ):
        check_environment([torch.device(kind, 0)], Precision())


class OwnSync(TorchSyncBatchNorm):
    """Converts layers in a way of its own."""


@pytest.mark.parametrize(
    "plugin, strategy, message",
    [
        (TorchSyncBatchNorm(), {}, r"got replicas=1\. Leave it out"),
        (OwnSync(), {"replicas": 2}, r"got OwnSync\. Leave it out"),
        (TorchSyncBatchNorm(), {"replicas": 2, "compile": True}, r"got compile=True\. Leave"),
        (
            TorchSyncBatchNorm(),
            {"replicas": 2, "deferred_batch_norm": False},
            r"got deferred_batch_norm=False\. Leave it out",
        ),
    ],
    ids=["one pipeline", "another kind", "compiled", "not deferred"],
)
def test_layer_sync(plugin: LayerSync, strategy: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_synchronised(plugin, GPipeStrategy([3, 3], **strategy).options)


@pytest.mark.parametrize("kind", [DeepSpeedPrecision, FSDPPrecision])
def test_precision_of_another_strategy(tmp_path: Path, kind: Any) -> None:
    with pytest.raises(ValueError, match=f"{kind.__name__} is for .*Write Trainer.precision="):
        fitted(tmp_path, GPipeStrategy([3, 3]), devices=2, plugins=[kind("bf16-mixed")])


@pytest.mark.parametrize("kind", [TransformerEnginePrecision, XLAPrecision])
def test_precision_that_needs_other_packages(kind: type[Precision]) -> None:
    plugin = kind.__new__(kind)  # as if its package were installed

    with pytest.raises(ValueError, match=f"{kind.__name__} is for .*Write Trainer.precision="):
        check_environment([], plugin)
