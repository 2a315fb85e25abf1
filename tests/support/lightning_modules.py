"""A small LightningModule, its data, and Trainers that leave nothing behind.

Everything is in float64, so that a plain and a pipelined run may differ in the order of floating
point sums only, and the comparisons can be sharp.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_gpipe import GPipeStrategy

FEATURES, WIDTH, CLASSES = 6, 8, 3


def six_layers() -> nn.Sequential:
    """The layers that a :class:`Classifier` pipelines by default."""
    return nn.Sequential(
        nn.Linear(FEATURES, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
    )


class Classifier(L.LightningModule):
    """Layers to pipeline, a layer and a metric that are not pipelined."""

    def __init__(
        self,
        optimizer: str = "momentum",
        scheduled: bool = False,
        layers: nn.Sequential | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters("optimizer", "scheduled")
        self.layers = six_layers() if layers is None else layers
        self.head = nn.Linear(WIDTH, CLASSES)
        self.accuracy = MulticlassAccuracy(num_classes=CLASSES)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x.to(self.head.weight.dtype)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer: torch.optim.Optimizer
        if self.hparams["optimizer"] == "adam":
            optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        else:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        if not self.hparams["scheduled"]:
            return optimizer
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def _evaluate(self, batch: Any, stage: str) -> None:
        x, y = batch
        output = self(x)
        self.accuracy(output, y)
        self.log(f"{stage}_loss", F.cross_entropy(output, y))
        self.log(f"{stage}_accuracy", self.accuracy)


class Data(L.LightningDataModule):
    """20 rows to train on in batches of 7, 7 and 6; 9 to evaluate in batches of 5 and 4."""

    def __init__(self, shuffle: bool = False) -> None:
        super().__init__()
        self.shuffle = shuffle

    def train_dataloader(self) -> Any:
        return DataLoader(rows(20, seed=1), batch_size=7, shuffle=self.shuffle)

    def val_dataloader(self) -> Any:
        return DataLoader(rows(9, seed=2), batch_size=5)

    test_dataloader = predict_dataloader = val_dataloader


def trainer(root: Path, strategy: GPipeStrategy | str = "auto", **options: Any) -> L.Trainer:
    """A Trainer that prints nothing, writes to ``root`` only, and runs on the CPU by default."""
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 3,
        "devices": 1,
    }
    return L.Trainer(default_root_dir=root, strategy=strategy, **(quiet | options))


def fitted(
    root: Path,
    strategy: GPipeStrategy | str = "auto",
    *,
    build: Callable[[], L.LightningModule] = Classifier,
    shuffle: bool = False,
    ckpt_path: Path | None = None,
    **options: Any,
) -> L.Trainer:
    """A Trainer after the fit of a model built from seed 0: its ``lightning_module``."""
    torch.manual_seed(0)
    model = build()
    made = trainer(root, strategy, **options)
    made.fit(model, datamodule=Data(shuffle), ckpt_path=ckpt_path)
    return made


def weights(trainer: L.Trainer) -> dict[str, Tensor]:
    """The state dict of the Trainer's model."""
    return dict(trainer.lightning_module.state_dict())


def assert_same_weights(one: L.Trainer, other: L.Trainer) -> None:
    """Both models have the same state dict, up to the order of floating point sums."""
    torch.testing.assert_close(weights(one), weights(other), rtol=1e-9, atol=1e-11)


def rows(count: int, seed: int) -> TensorDataset:
    """Inputs with classes that a linear layer can tell apart."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x[:, :CLASSES].argmax(1))
