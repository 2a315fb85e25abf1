"""A logger of MLflow, into files: a pipelined run writes what the plain one writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import mlflow.pytorch
import pytest
import torch
from lightning.pytorch.loggers import MLFlowLogger

from lightning_gpipe import GPipeStrategy
from tests.lightning.features.run import Case, Run, assert_same_run, close, run
from tests.support.lightning_modules import fitted


@pytest.fixture(autouse=True)
def _files(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow 3 asks for a database else, which needs more packages."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")


def options(root: Path) -> dict[str, Any]:
    logger = MLFlowLogger("one", save_dir=str(root / "mlruns"), log_model="all")
    return {"logger": logger, "log_every_n_steps": 1, "enable_checkpointing": True}


def written(run: Run) -> Any:
    """The parameters, the history of each metric, and the files, of which some are checkpoints."""
    logger: Any = run.trainer.logger
    client = logger.experiment
    data = client.get_run(logger.run_id).data
    metrics = {
        name: [(each.step, each.value) for each in client.get_metric_history(logger.run_id, name)]
        for name in sorted(data.metrics)
    }
    folder = next(run.root.glob("mlruns/*/*/artifacts"))
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return (
        data.params,
        metrics,
        [str(path.relative_to(folder)) for path in files],
        [torch.load(path)["state_dict"] for path in files if path.suffix == ".ckpt"],
    )


CASE = Case(options, written)


def test_run(tmp_path: Path) -> None:
    plain, piped = (run(CASE, tmp_path / str(each), piped=each) for each in (False, True))

    expected = written(plain)
    assert all(expected)
    close(written(piped), expected)
    assert_same_run(piped, plain)


@pytest.fixture
def _autolog(tmp_path: Path) -> Iterator[None]:
    """MLflow logs fits by itself, by patching the Trainer."""
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    mlflow.pytorch.autolog(log_every_n_step=1, log_models=False, silent=True)
    yield
    mlflow.pytorch.autolog(disable=True, silent=True)


@pytest.mark.usefixtures("_autolog")
def test_autolog(tmp_path: Path) -> None:
    found = []
    for strategy in ("auto", GPipeStrategy([2, 4], chunks=3)):
        with mlflow.start_run() as begun:
            fitted(tmp_path, strategy, devices=1 if strategy == "auto" else 2)
        data = mlflow.get_run(begun.info.run_id).data
        found.append((data.params, dict(sorted(data.metrics.items()))))

    assert all(found[0])
    close(found[1], found[0])
