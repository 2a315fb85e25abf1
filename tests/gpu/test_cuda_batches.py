"""The batch of a Trainer on several GPUs: hooks may edit it, and layers get views of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_gpipe import GPipeStrategy
from tests.gpu.trainers import MANY, Deep, needs, piped, plain
from tests.support.lightning_modules import Data, assert_same_weights, fitted, rows

on_many = pytest.mark.parametrize("gpus", [pytest.param(MANY, marks=needs(2), id="gpus")])


class Edits(Deep):
    """Edits its batch where it arrives, and looks at it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str]] = []

    def transfer_batch_to_device(self, batch: Any, device: torch.device, index: int) -> Any:
        assert {str(each.device) for each in batch} == {"cpu"}
        assert device == self.trainer.strategy.root_device
        return super().transfer_batch_to_device(batch, device, index)

    def on_after_batch_transfer(self, batch: Any, index: int) -> Any:
        self.seen += [(str(each.device), str(self.device)) for each in batch]
        x, y = batch
        if self.trainer.global_step % 2:
            x.mul_(2)
        return x, y


@on_many
@pytest.mark.filterwarnings("ignore:You have overridden")
def test_hooks_see_the_batch_on_the_last_device_and_may_edit_it(tmp_path: Path, gpus: int) -> None:
    made = piped(tmp_path, gpus, build=Edits)

    model = made.lightning_module
    assert isinstance(model, Edits)
    assert {*model.seen} == {(f"cuda:{gpus - 1}",) * 2}
    assert_same_weights(made, plain(tmp_path, build=Edits))


class Views(Deep):
    """Gives its layers a view of the batch, and not all rows."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x.view(-1).view(x.shape)[1:]))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return torch.nn.functional.cross_entropy(self(x), y[1:])


@on_many
def test_views_of_the_batch(tmp_path: Path, gpus: int) -> None:
    made = piped(tmp_path, gpus, build=Views, limit_val_batches=0)

    assert_same_weights(made, plain(tmp_path, build=Views, limit_val_batches=0))


class Pinned(Data):
    """Its loader pins memory."""

    def train_dataloader(self) -> Any:
        return DataLoader(rows(20, seed=1), batch_size=7, pin_memory=True)


@on_many
def test_pinned_memory(tmp_path: Path, gpus: int) -> None:
    torch.manual_seed(0)
    made = L.Trainer(
        default_root_dir=tmp_path,
        accelerator="gpu",
        devices=gpus,
        strategy=GPipeStrategy(chunks=3),
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    made.fit(Deep(), datamodule=Pinned())

    assert_same_weights(made, fitted(tmp_path, build=Deep, accelerator="gpu", devices=1))
