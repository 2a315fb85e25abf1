"""Files of a run over several processes: one writes what is of the run, each replica its rows."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader

from tests.lightning.test_predictions import Layers, Writes, predicted
from tests.support.lightning_modules import Classifier, Data, rows
from tests.support.ranks import Pool
from tests.support.trainers import trainer_over

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

Way = tuple[str, tuple[int, int] | None, dict[str, Any]]
STAGES: Way = ("per_stage", None, {})
REPLICAS: Way = ("single", (4, 1), {"replicas": 2})
every_way = pytest.mark.parametrize("way", [STAGES, REPLICAS], ids=["stages", "replicas"])


def made(root: Path, way: Way, **options: Any) -> Any:
    """A Trainer of this process, which has a folder of its own to write to."""
    processes, machines, strategy = way
    return trainer_over(root, processes, [2, 4], strategy, machines, **options)


def fit(root: Path, way: Way) -> list[str]:
    """The files that this process has written, where each would write to another folder."""
    own = root / str(dist.get_rank())
    own.mkdir()
    trainer = made(
        own,
        way,
        max_epochs=1,
        logger=CSVLogger(own, name="logs", version=""),
        callbacks=[ModelCheckpoint(filename="{epoch}")],
        enable_checkpointing=True,
        log_every_n_steps=1,
    )
    trainer.fit(Classifier(), datamodule=Data())
    trainer.save_checkpoint(root / "end.ckpt")
    return sorted(str(path.relative_to(own)) for path in own.rglob("*") if path.is_file())


@every_way
def test_first_process_writes_what_is_of_the_run(tmp_path: Path, two_ranks: Pool, way: Way) -> None:
    first, second = two_ranks.run(partial(fit, tmp_path, way))

    assert first == ["logs/checkpoints/epoch=0.ckpt", "logs/hparams.yaml", "logs/metrics.csv"]
    assert second == []
    assert [path.name for path in tmp_path.glob("*.*")] == ["end.ckpt"]


def predict(root: Path, way: Way) -> tuple[list[Any], int]:
    """What this process has written, and of how many batches at once there was something."""
    own = root / str(dist.get_rank())
    own.mkdir()
    torch.manual_seed(0)
    writer = Writes(own)
    data = DataLoader(rows(36, seed=3), batch_size=4)
    made(own, way, callbacks=[writer]).predict(Layers(), data, return_predictions=False)
    return [torch.load(path) for path in own.glob("*.pt")], writer.most


def by_row(written: Iterable[Any]) -> dict[int, Tensor]:
    """The prediction for each row."""
    return {
        index: row
        for prediction, indices in written
        for index, row in zip(indices, prediction, strict=True)
    }


@every_way
def test_predictions_are_written_as_they_come(tmp_path: Path, two_ranks: Pool, way: Way) -> None:
    """All by each process of a pipeline, which have them anyway; its part by each replica."""
    expected = by_row(predicted(tmp_path / "plain")[0])

    (first, _), (second, _) = found = two_ranks.run(partial(predict, tmp_path, way))

    one, other = by_row(first), by_row(second)
    assert all(most <= 2 for _, most in found), "that of the batch before, and the new one"
    assert one.keys() == other.keys() if way is STAGES else one.keys().isdisjoint(other)
    assert dict(sorted((one | other).items())).keys() == expected.keys()
    torch.testing.assert_close({k: (one | other)[k] for k in expected}, expected)
