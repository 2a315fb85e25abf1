"""Processes of a Trainer that pause go on together; one that skips a step is named."""

import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from tests.support.lightning_modules import WIDTH, Classifier, Data, rows
from tests.support.processes import said
from tests.support.ranks import Pool, new_ranks
from tests.support.trainers import trainer_over

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

LOST_AFTER = timedelta(seconds=2)


class Pause(Callback):
    """Pauses on a rank before a batch is loaded, or while a checkpoint is saved."""

    def __init__(self, rank: int, where: str) -> None:
        self._at = rank, where

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 1:
            self._come_to("loader", trainer)

    def on_save_checkpoint(self, trainer: L.Trainer, *_: Any) -> None:
        self._come_to("saving", trainer)

    def _come_to(self, where: str, trainer: L.Trainer) -> None:
        if (trainer.global_rank, where) == self._at:
            time.sleep(2 * LOST_AFTER.total_seconds())


def fit_with_a_pause(root: Path, rank: int, where: str) -> int:
    """The steps of a fit in which a rank pauses somewhere."""
    strategy = {"lost_after": LOST_AFTER}
    callbacks = [Pause(rank, where)]
    made = trainer_over(root, "per_stage", [2, 4], strategy, max_epochs=1, callbacks=callbacks)
    made.fit(Classifier(), datamodule=Data())
    made.save_checkpoint(root / "end.ckpt")
    return made.global_step


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Pool]:
    pool = Pool(2)
    yield pool
    pool.close()


@pytest.mark.parametrize("rank, where", [(0, "loader"), (1, "saving")])
def test_process_that_pauses_for_longer_than_the_bound(
    two_ranks: Pool, tmp_path: Path, rank: int, where: str
) -> None:
    assert two_ranks.run(fit_with_a_pause, tmp_path, rank, where) == [3, 3]


class Skipping(Classifier):
    """Skips the second step on rank 1."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1 and dist.get_rank() == 1:
            return None
        return super().training_step(batch, batch_idx)


def fit_skipping(root: Path) -> str:
    made = trainer_over(root, "per_stage", [2, 4], {"lost_after": LOST_AFTER})
    try:
        made.fit(Skipping(), datamodule=Data())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_step_that_one_process_skips(tmp_path: Path) -> None:
    with new_ranks(2) as ranks:
        first, second = ranks.run(fit_skipping, tmp_path)

    assert "by returning None" in second
    assert first.startswith("RankFailed: rank 1 (stage 1) failed: ")


class Around(Classifier):
    """Goes around the pipeline in the second step, on some ranks."""

    def __init__(self, *ranks: int) -> None:
        super().__init__()
        self._ranks = ranks

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1 and dist.get_rank() in self._ranks:
            x, y = batch
            return cross_entropy(self.head(x.new_ones(len(x), WIDTH)), y)
        return super().training_step(batch, batch_idx)


def fit_around(root: Path, *ranks: int) -> str:
    made = trainer_over(root, "per_stage", [2, 4], {"lost_after": LOST_AFTER}, max_epochs=1)
    return said(lambda: made.fit(Around(*ranks), datamodule=Data()))


@pytest.mark.parametrize("rank", [0, 1])
def test_step_in_which_one_process_goes_around_the_pipeline(tmp_path: Path, rank: int) -> None:
    """Once the other one waited for its stages, and it for something else, for half an hour."""
    with new_ranks(2) as ranks:
        found = ranks.run(fit_around, tmp_path, rank)

    assert any(message.startswith("OutOfStep | ") for message in found), found
    for message in found:
        assert f"rank {rank} (stage {rank}) runs a step without a pipeline" in message or (
            f"and rank {rank} (stage {rank}) a step without a pipeline" in message
        )


def test_step_in_which_all_go_around_the_pipeline(two_ranks: Pool, tmp_path: Path) -> None:
    assert two_ranks.run(fit_around, tmp_path, 0, 1) == ["none", "none"]


class Fewer(Data):
    """One batch less on rank 1."""

    def train_dataloader(self) -> Any:
        return DataLoader(rows(20 - 7 * dist.get_rank(), seed=1), batch_size=7)


def fit_fewer(root: Path) -> int:
    made = trainer_over(root, "per_stage", [2, 4], {}, max_epochs=2)
    made.fit(Classifier(), datamodule=Fewer())
    return made.global_step


def test_dataset_that_is_smaller_in_one_process(two_ranks: Pool, tmp_path: Path) -> None:
    assert two_ranks.run(fit_fewer, tmp_path) == [6, 6]
