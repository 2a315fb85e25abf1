"""A loader whose state is in checkpoints, and a model that draws from all generators."""

import random
from collections.abc import Iterator
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.lightning_modules import Classifier, rows, six_layers


def seed_all(seed: int) -> None:
    """Seed all generators of the host."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


class ResumableLoader:
    """Batches in an order that is drawn for each epoch; goes on where it was."""

    def __init__(self, data: TensorDataset, size: int) -> None:
        self._data = data
        self._size = size
        self._order = torch.arange(0)
        self._given = 0
        self._goes_on = False  # as a state that was loaded says

    def __len__(self) -> int:
        return -(-len(self._data) // self._size)

    def __iter__(self) -> Iterator[Any]:
        if not self._goes_on:
            self._order, self._given = torch.randperm(len(self._data)), 0
        self._goes_on = False
        return self._rest()

    def _rest(self) -> Iterator[Any]:
        while self._given < len(self):
            k, self._given = self._given, self._given + 1
            yield self._data[self._order[k * self._size : (k + 1) * self._size]]

    def state_dict(self) -> dict[str, Any]:
        return {"order": self._order, "given": self._given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._order, self._given = state["order"], state["given"]
        self._goes_on = self._given < len(self)


class ResumableData(L.LightningDataModule):
    """20 rows to train on, in batches of 7, 7 and 6 unless another size is given.

    Args:
        resumable: Whether in the middle of an epoch; else they are shuffled by a DataLoader.
        size: Of a batch.
        generator: Whether the DataLoader has a generator of its own.
    """

    def __init__(self, resumable: bool = True, size: int = 7, generator: bool = False) -> None:
        super().__init__()
        self._resumable = resumable
        self._size = size
        self._generator = torch.Generator() if generator else None

    def train_dataloader(self) -> Any:
        if self._resumable:
            return ResumableLoader(rows(20, seed=1), self._size)
        if self._generator is not None:
            self._generator.manual_seed(torch.initial_seed())
        return DataLoader(
            rows(20, seed=1), batch_size=self._size, shuffle=True, generator=self._generator
        )

    def val_dataloader(self) -> Any:
        # A DataLoader draws, if only a seed for its processes.
        return DataLoader(rows(9, seed=2), batch_size=5, generator=torch.Generator())


class Noise(nn.Module):
    """Adds numbers to what goes through in training, drawn from all generators of the host."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        drawn = random.random() + float(np.random.random())
        return x + 0.1 * drawn + 0.1 * torch.randn_like(x)


class Drawing(Classifier):
    """Drops values in its layers, and adds noise to their output."""

    def __init__(self) -> None:
        layers = six_layers()
        layers[1] = nn.Sequential(nn.Tanh(), nn.Dropout(0.2))
        super().__init__("adam", layers=layers)
        self.noise = Noise()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.noise(self.layers(x)))


class SavesAt(Callback):
    """Saves after a training step, at the end of an epoch, or of the validation in it."""

    def __init__(self, path: Any, *, step: int = -1, epoch: int = -1, validation: int = -1) -> None:
        self._path = path
        self._step = step
        self._epoch = epoch
        self._validation = validation

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self._step:
            trainer.save_checkpoint(self._path)

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.current_epoch == self._epoch:
            trainer.save_checkpoint(self._path)

    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.current_epoch == self._validation and not trainer.sanity_checking:
            trainer.save_checkpoint(self._path)
