"""The batch of a Trainer on several GPUs: the pipeline's input goes straight to the first stage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.core.transport import copies
from tests.gpu.trainers import MANY, Deep, needs, piped, plain
from tests.support.lightning_modules import Data, assert_same_weights, fitted, rows

# On two GPUs the gradients go back the same way.
on_four_gpus = pytest.mark.parametrize("gpus", [pytest.param(4, marks=needs(4))])
on_many = pytest.mark.parametrize("gpus", [pytest.param(MANY, marks=needs(2), id="gpus")])


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """From where to where the pipeline copies, in order."""
    found: list[tuple[str, str]] = []
    original: Callable[..., Tensor] = copies.Copies._copy

    def copy(self: Any, tensor: Tensor, target: torch.device) -> Tensor:
        found.append((str(tensor.device), str(target)))
        return original(self, tensor, target)

    monkeypatch.setattr(copies.Copies, "_copy", copy)
    return found


@on_four_gpus
def test_input_does_not_go_by_way_of_the_last_device(
    tmp_path: Path, gpus: int, ways: list[tuple[str, str]]
) -> None:
    made = piped(tmp_path, gpus, limit_val_batches=0)

    around = ("cuda:3", "cuda:0")
    assert ways.count(around) == 3, "of the first batch only, which showed what is needed there"
    assert ways.count(("cuda:0", "cuda:1")) == 3 * 9
    assert_same_weights(made, plain(tmp_path, limit_val_batches=0))


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
