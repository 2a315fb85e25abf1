"""Plain checkpoints: resuming within an epoch is exact with torchdata's loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_gpipe import GPipeStrategy
from tests.support.lightning_modules import rows, trainer
from tests.support.processes import assert_equal
from tests.support.resumable import Drawing, ResumableData, SavesAt, seed_all

pytestmark = [
    pytest.mark.usefixtures("one_intra_op_thread", "own_generator"),
    # torchdata 0.11, stateful_dataloader.py, under torch >= 2.13.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]


class StatefulData(ResumableData):
    """The same rows, in an order that is drawn for each epoch."""

    def __init__(self, workers: int) -> None:
        super().__init__()
        self._workers = workers

    def train_dataloader(self) -> Any:
        return StatefulDataLoader(
            rows(20, seed=1), batch_size=7, shuffle=True, num_workers=self._workers
        )


def fit(root: Path, workers: int, *, seed: int, **options: Any) -> dict[str, Any]:
    seed_all(seed)
    model = Drawing()
    path = options.pop("ckpt_path", None)
    callbacks: list[L.Callback] = [SavesAt(root / "half.ckpt", **options)] if options else []
    strategy = GPipeStrategy([2, 4], 3, activation_checkpointing="always")
    made = trainer(root, strategy, devices=2, callbacks=callbacks)
    made.fit(model, datamodule=StatefulData(workers), ckpt_path=path)
    return {"weights": model.state_dict(), "step": made.global_step}


WHEN = {"middle": {"step": 5}, "end": {"epoch": 1}}


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("workers", [0, 2])
def test_resumed_run(tmp_path: Path, workers: int, when: str) -> None:
    """At the end of an epoch its own generator would be another one, as in Lightning."""
    whole = fit(tmp_path, workers, seed=1, **WHEN[when])

    resumed = fit(tmp_path, workers, seed=2, ckpt_path=tmp_path / "half.ckpt")

    assert_equal(resumed, whole)


def test_last_step_of_an_epoch(tmp_path: Path) -> None:
    """The loader has given all its batches, so the next epoch has none, as in Lightning."""
    fit(tmp_path, 0, seed=1, step=3)

    resumed = fit(tmp_path, 0, seed=2, ckpt_path=tmp_path / "half.ckpt")

    assert resumed["step"] == 6, "of nine"
