"""Counts the calls in a step of the Trainer: ``python -m tests.support.trainer_calls``.

In a process of its own, since a process that has imported other libraries has more to look after.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from types import FrameType
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpipe import GPipe, GPipeStrategy

WARM_UP = 5  # batches that look for what later ones know
# Of modules with these names: how torch leaves a function uncompiled differs between versions.
COUNTED = "lightning", "torch.nn", "contextlib"


class Model(L.LightningModule):
    """A LightningModule that logs its loss."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss: Tensor = self.layers(*batch).sum()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Count(L.Callback):
    """Counts the calls of functions from the end of a batch to the end of the next."""

    def __init__(self) -> None:
        self.calls = 0

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        sys.setprofile(self._profile if trainer.global_step == WARM_UP else None)

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        named = frame.f_globals.get("__name__", "")
        self.calls += event == "call" and named.startswith(COUNTED)


def calls_in_a_batch(layers: nn.Module, strategy: Strategy | str) -> int:
    """The calls in a batch of a fit."""
    count = Count()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_steps=WARM_UP + 2,
        callbacks=[count],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = TensorDataset(torch.ones(4 * WARM_UP, 2))
    trainer.fit(Model(layers), DataLoader(rows, batch_size=2))
    return count.calls


def counts() -> dict[str, int]:
    """The calls of plain Lightning, of a pipeline in it, and with the strategy."""
    return {
        "plain": calls_in_a_batch(_layers(), "auto"),
        "pipeline": calls_in_a_batch(GPipe(_layers(), [2], devices=["cpu"]), "auto"),
        "strategy": calls_in_a_batch(_layers(), GPipeStrategy([2], chunks=1, module="layers")),
    }


def _layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    print(json.dumps(counts()))
