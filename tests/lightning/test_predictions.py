"""Cost: predictions that are written immediately are not kept."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_gpipe import GPipeStrategy
from tests.support.lightning_modules import Classifier, rows, trainer
from tests.support.pipes import with_and_without_threads

BATCHES, SIZE = 9, 4


class Layers(Classifier):
    """Predicts what comes out of the pipeline."""

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layers(batch[0])


class Writes(BasePredictionWriter):
    """Writes each batch into a file, and notes how many are alive."""

    def __init__(self, root: Path) -> None:
        super().__init__("batch")
        self._root = root
        self._given: list[weakref.ref[Tensor]] = []
        self.most = 0

    def write_on_batch_end(
        self,
        trainer: Any,
        pl_module: Any,
        prediction: Any,
        batch_indices: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        self._given.append(weakref.ref(prediction))
        self.most = max(self.most, sum(each() is not None for each in self._given))
        torch.save((prediction, batch_indices), self._root / f"{batch_idx}.pt")


def predicted(root: Path, *strategy: GPipeStrategy, keep: bool = False) -> tuple[list[Any], int]:
    """What was written, and of how many batches at once there was something."""
    root.mkdir()
    torch.manual_seed(0)
    writer = Writes(root)
    made = trainer(root, *strategy, devices=1 + len(strategy), callbacks=[writer])
    data = DataLoader(rows(BATCHES * SIZE, seed=3), batch_size=SIZE)

    made.predict(Layers(), data, return_predictions=keep)

    files = sorted(root.glob("*.pt"), key=lambda path: int(path.stem))
    return [torch.load(path) for path in files], writer.most


@with_and_without_threads
def test_written_predictions_are_let_go(tmp_path: Path, threads: bool) -> None:
    expected, _ = predicted(tmp_path / "plain")

    found, most = predicted(tmp_path / "piped", GPipeStrategy([2, 4], chunks=2, threads=threads))

    assert len(expected) == BATCHES
    torch.testing.assert_close(found, expected)
    assert most <= 2, "that of the batch before, and the new one"


def test_predictions_that_are_returned_are_kept(tmp_path: Path) -> None:
    """So the count sees what is kept."""
    _, most = predicted(tmp_path / "piped", GPipeStrategy([2, 4], chunks=2), keep=True)

    assert most == BATCHES
