"""Loggers, in use."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from tests.lightning.features.run import Case, Run, described


class Told(Logger):
    """Notes what it is told, as a service would get it."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Any] = []

    @property
    def name(self) -> str:
        return "told"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.told.append(("log_metrics", dict(metrics), step))

    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None:
        self.told.append(("log_hyperparams", described(dict(params))))

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        self.told.append(("log_graph", type(model).__name__))

    def save(self) -> None:
        self.told.append(("save",))

    def finalize(self, status: str) -> None:
        self.told.append(("finalize", status))

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        self.told.append(("after_save_checkpoint", checkpoint_callback.best_model_path[-8:]))


def rows_of(run: Run) -> list[dict[str, Any]]:
    """What a CSVLogger wrote."""
    path = Path(str(run.trainer.log_dir)) / "metrics.csv"
    with path.open(encoding="utf-8", newline="") as file:
        return [
            {name: float(text) for name, text in row.items() if text}
            for row in csv.DictReader(file)
        ]


def scalars_of(run: Run) -> dict[str, Any]:
    """What a TensorBoardLogger wrote."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]  # it has no stubs
        EventAccumulator,
    )

    events = EventAccumulator(str(run.trainer.log_dir))
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def told(run: Run) -> Any:
    """What the logger of the test was told."""
    return run.trainer.logger.told  # type: ignore[union-attr]  # the one given


CASES: dict[str, Case] = {
    "Logger": Case(
        lambda root: {"logger": Told(), "log_every_n_steps": 1, "enable_checkpointing": True}, told
    ),
    "CSVLogger": Case(lambda root: {"logger": CSVLogger(root), "log_every_n_steps": 2}, rows_of),
    "TensorBoardLogger": Case(
        lambda root: {"logger": TensorBoardLogger(root), "log_every_n_steps": 1}, scalars_of
    ),
}
