"""Monitors and generators of all GPUs of a pipeline."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import DeviceStatsMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from lightning_gpipe import GPipeStrategy
from tests.gpu.trainers import Deep, needs, on_many_gpus, on_two_and_many_gpus, piped, plain
from tests.support.lightning_modules import trainer, weights
from tests.support.resumable import ResumableData, SavesAt, seed_all

pytestmark = needs(2)

BEGIN = "DeviceStatsMonitor.on_train_batch_end/"


def logged(logger: CSVLogger) -> dict[str, str]:
    """The statistics after the only step, without the hook."""
    with (Path(logger.log_dir) / "metrics.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return {
        name.removeprefix(BEGIN): text
        for row in rows
        for name, text in row.items()
        if text and name.startswith(BEGIN)
    }


@on_two_and_many_gpus
def test_statistics_of_all_gpus(tmp_path: Path, gpus: int) -> None:
    def run(fit: Any, *args: Any) -> dict[str, str]:
        logger = CSVLogger(tmp_path, version=len(args))
        monitor = DeviceStatsMonitor(cpu_stats=False)
        options: dict[str, Any] = {"max_steps": 1, "log_every_n_steps": 1}
        fit(tmp_path, *args, logger=logger, callbacks=[monitor], **options)
        return logged(logger)

    of_one = run(plain)
    found = run(piped, gpus)

    assert of_one, "the device has statistics"
    names = {f"cuda:{k}/{name}" for k in range(gpus - 1) for name in of_one}
    assert {*found} == {*of_one} | names
    allocated = [name for name in found if name.endswith("allocated_bytes.all.current")]
    assert len(allocated) == gpus
    assert all(float(found[name]) > 0 for name in allocated), "each has a stage"


class Dropping(Deep):
    """Draws on every GPU."""

    def __init__(self) -> None:
        super().__init__("adam")
        for k in range(1, len(self.layers), 2):
            self.layers[k] = nn.Sequential(nn.Tanh(), nn.Dropout(0.3))


@on_many_gpus
@pytest.mark.parametrize("step", [3, 5], ids=["last-step", "middle"])
def test_resumed_run_draws_as_the_one_before(tmp_path: Path, gpus: int, step: int) -> None:
    """Each GPU has a generator of its own."""

    def fit(seed: int, ckpt_path: Path | None = None, **options: Any) -> L.Trainer:
        seed_all(seed)
        strategy = GPipeStrategy(chunks=3)
        made = trainer(tmp_path, strategy, accelerator="gpu", devices=gpus, **options)
        made.fit(Dropping(), datamodule=ResumableData(), ckpt_path=ckpt_path)
        return made

    path = tmp_path / "half.ckpt"
    whole = fit(1, callbacks=[SavesAt(path, step=step)])

    resumed = fit(2, path)

    torch.testing.assert_close(weights(resumed), weights(whole), rtol=0, atol=0)
