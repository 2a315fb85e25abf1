"""Arguments of the Trainer, in use."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, ModelSummary, ProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.profilers import SimpleProfiler

from tests.lightning.features.loggers import Told, rows_of
from tests.lightning.features.run import Case, Run
from tests.support.lightning_modules import Data


class Stops(Callback):
    """Would end the fit after its first batch."""

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.should_stop = True


class Counts(Data):
    """Counts how often its training data are loaded."""

    loaded = 0

    def train_dataloader(self) -> Any:
        self.loaded += 1
        return super().train_dataloader()


def given(**options: Any) -> Any:
    """The options, whatever the folder."""
    return lambda root: options


def steps(run: Run) -> int:
    """How many steps the optimizer took."""
    return run.trainer.global_step


def epochs(run: Run) -> int:
    """How many epochs were run."""
    return run.trainer.current_epoch


def validations(run: Run) -> int:
    """How often validation ended."""
    return run.count("on_validation_end")


def names(run: Run) -> list[str]:
    """The files that were written."""
    return sorted(path.name for path in run.root.rglob("*") if path.is_file())


NEW = ("enable_autolog_hparams", "model_registry")  # in Lightning 2.6
ALL = ("fit", "validate", "test", "predict")

CASES: dict[str, Case] = {
    "logger": Case(lambda root: {"logger": CSVLogger(root), "log_every_n_steps": 1}, rows_of),
    "callbacks": Case(lambda root: {"callbacks": [Stops()]}, steps),
    "max_epochs": Case(given(max_epochs=1), epochs),
    "min_epochs": Case(
        lambda root: {"callbacks": [Stops()], "min_epochs": 2, "max_epochs": 4}, epochs
    ),
    "max_steps": Case(given(max_steps=4), steps),
    "min_steps": Case(lambda root: {"callbacks": [Stops()], "min_steps": 2}, steps),
    "max_time": Case(given(max_time=timedelta(0)), lambda run: run.count("on_fit_end")),
    "limit_train_batches": Case(given(limit_train_batches=2), steps),
    "limit_val_batches": Case(
        given(limit_val_batches=1), lambda run: run.count("on_validation_batch_end")
    ),
    "limit_test_batches": Case(
        given(limit_test_batches=1), lambda run: run.count("on_test_batch_end"), ("test",)
    ),
    "limit_predict_batches": Case(
        given(limit_predict_batches=1), lambda run: run.results[0], ("predict",)
    ),
    "val_check_interval": Case(given(val_check_interval=2), validations),
    "check_val_every_n_epoch": Case(given(check_val_every_n_epoch=2), validations),
    "num_sanity_val_steps": Case(
        given(num_sanity_val_steps=1), lambda run: run.count("on_sanity_check_end")
    ),
    "log_every_n_steps": Case(
        lambda root: {"logger": Told(), "log_every_n_steps": 2},
        lambda run: [call for call in run.trainer.logger.told if call[0] == "log_metrics"],  # type: ignore[union-attr]  # the one given
    ),
    "enable_checkpointing": Case(given(enable_checkpointing=True), names),
    "enable_progress_bar": Case(
        given(enable_progress_bar=True),
        lambda run: type(run.callback(ProgressBar)).__name__,
    ),
    "enable_model_summary": Case(
        given(enable_model_summary=True), lambda run: run.callback(ModelSummary)._max_depth
    ),
    "deterministic": Case(
        given(deterministic=True), lambda run: torch.are_deterministic_algorithms_enabled()
    ),
    "benchmark": Case(given(benchmark=True), lambda run: torch.backends.cudnn.benchmark),
    "use_distributed_sampler": Case(
        given(use_distributed_sampler=False),
        lambda run: type(run.trainer.train_dataloader.sampler).__name__,  # type: ignore[union-attr]  # it has trained
    ),
    "plugins": Case(
        lambda root: {"plugins": [DoublePrecision()]}, lambda run: run.trainer.precision
    ),
    "profiler": Case(
        given(profiler="simple"),
        lambda run: isinstance(run.trainer.profiler, SimpleProfiler),  # type: ignore[attr-defined]  # set by a connector
    ),
    "barebones": Case(given(barebones=True), steps, warns="You are trying to `self.log"),
    "reload_dataloaders_every_n_epochs": Case(
        given(reload_dataloaders_every_n_epochs=1), lambda run: run.data.loaded, data=Counts
    ),
    "default_root_dir": Case(
        lambda root: {"callbacks": [ModelCheckpoint(filename="here")]},
        lambda run: (run.root / "checkpoints" / "here.ckpt").exists(),
    ),
    "enable_autolog_hparams": Case(
        lambda root: {"logger": Told(), "enable_autolog_hparams": False},
        lambda run: sorted({call[0] for call in run.trainer.logger.told}),  # type: ignore[union-attr]  # the one given
    ),
    "model_registry": Case(
        given(model_registry="team/model"),
        lambda run: run.trainer._model_registry,
    ),
    "fit": Case(given(), steps, ALL),
}
