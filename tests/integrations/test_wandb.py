"""A logger of W&B, offline: a pipelined run writes what the plain run on one device writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import wandb
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import WandbLogger

from tests.integrations.wandb_files import config, history
from tests.lightning.features.run import Case, Run, assert_same_run, close, run


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No run of W&B goes on after a test, and none prints."""
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    yield
    wandb.finish()
    wandb.teardown()


class Watches(Callback):
    """Asks W&B for histograms of all gradients and parameters, and for the graph."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        logger: Any = trainer.logger
        logger.watch(pl_module, log="all", log_freq=1)

    def on_fit_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        logger: Any = trainer.logger
        logger.experiment.unwatch(pl_module)


def options(root: Path, *callbacks: Callback) -> dict[str, Any]:
    logger = WandbLogger(save_dir=root, offline=True)
    return {"logger": logger, "log_every_n_steps": 1, "callbacks": [*callbacks]}


def written(run: Run) -> Any:
    """What is in the file, once the process that writes it has ended."""
    wandb.finish()
    wandb.teardown()
    return config(run.root), history(run.root)


@pytest.mark.parametrize("callbacks", [[], [Watches]], ids=["metrics", "watched"])
def test_run(tmp_path: Path, callbacks: list[type[Callback]]) -> None:
    case = Case(lambda root: options(root, *(each() for each in callbacks)), written)

    plain = run(case, tmp_path / "plain", piped=False)
    expected = written(plain)
    piped = run(case, tmp_path / "piped", piped=True)
    found = written(piped)

    assert expected[0] and len(expected[1]) > 6
    close(found, expected)
    assert_same_run(piped, plain)
