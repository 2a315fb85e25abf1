"""What one process of several does alone, as callbacks do that are for the first one only."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Literal

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from tests.support.lightning_modules import Classifier, Data
from tests.support.ranks import Pool
from tests.support.trainers import trainer_over

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


class Draws(L.Callback):
    """Draws random numbers in the first process."""

    @rank_zero_only
    def on_train_batch_end(self, *_: Any) -> None:
        np.random.rand()
        random.random()


class Mixes(Classifier):
    """Mixes rows of its batches by random numbers, and logs in one process."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        share = np.random.rand() * random.random()
        self.drawn.append(share)
        x, y = batch
        return super().training_step([share * x + (1 - share) * x.flip(0), y], batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.is_global_zero:
            self.log("alone", 1.0, rank_zero_only=True)


def drawn(root: Path, outputs: Literal["all", "last"]) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Mixes()
    made = trainer_over(root, "per_stage", [2, 4], {"outputs": outputs}, callbacks=[Draws()])
    made.fit(model, datamodule=Data())
    return model.drawn, made.callback_metrics


@pytest.mark.parametrize("outputs", ["all", "last"])
def test_random_numbers_of_numpy_and_python(
    tmp_path: Path, two_ranks: Pool, outputs: Literal["all", "last"]
) -> None:
    """Once a stage mixed the inputs by one number, and the loss by another."""
    (first, metrics), (second, _) = two_ranks.run(drawn, tmp_path, outputs)

    assert len(set(first)) == len(first) > 2
    assert second in (first, [])
    assert metrics["alone"] == 1.0
