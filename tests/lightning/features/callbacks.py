"""Callbacks, in use."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch import callbacks as library
from torch import nn
from torch.utils.data import DataLoader

from tests.lightning.features.loggers import Told
from tests.lightning.features.run import Case, Run
from tests.support.lightning_modules import FEATURES, Classifier, Data, rows


class Rated(Classifier):
    """Has the learning rate that a callback sets, and an input for the summary."""

    lr = 0.1
    flops_per_batch = 1000

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.ones(2, FEATURES, dtype=torch.float64)

    @property
    def backbone(self) -> nn.Module:
        return self.layers

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, lr=self.lr)


class Sized(Data):
    """Has the batch size that a callback sets."""

    batch_size = 2

    def train_dataloader(self) -> Any:
        return DataLoader(rows(20, seed=1), batch_size=self.batch_size)


class Writes(library.BasePredictionWriter):
    """Writes each batch of predictions as it comes."""

    def __init__(self, root: Path) -> None:
        super().__init__("batch")
        self._root = root

    def write_on_batch_end(
        self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, *rest: Any
    ) -> None:
        torch.save((prediction, batch_indices), self._root / f"{rest[1]}.pt")


class Own(library.Checkpoint):
    """A way to save of the user's own."""

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        path = Path(trainer.default_root_dir, f"own{trainer.current_epoch}.ckpt")
        trainer.save_checkpoint(path, weights_only=True)


class Bar(library.ProgressBar):
    """A bar of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.shown.append(sorted(self.get_metrics(trainer, pl_module)))


class Halts(library.Callback):
    """Raises in the second epoch."""

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            raise ArithmeticError


def logged(run: Run) -> list[str]:
    """The names of what was logged."""
    told: Any = run.trainer.loggers[0]
    return sorted({name for kind, *rest in told.told if kind == "log_metrics" for name in rest[0]})


def rates(run: Run) -> list[float]:
    """The learning rates that were logged."""
    told: Any = run.trainer.loggers[0]
    logged = [rest[0] for kind, *rest in told.told if kind == "log_metrics"]
    return [metrics["lr-SGD"] for metrics in logged if "lr-SGD" in metrics]


def predictions(run: Run) -> Any:
    """What was written of the predictions."""
    return [torch.load(path) for path in sorted(run.root.glob("*.pt"))]


def saved(run: Run) -> Any:
    """The weights in what was saved."""
    return [torch.load(path)["state_dict"] for path in sorted(run.root.glob("*.ckpt"))]


def printed(run: Run) -> str:
    """What was printed, but for spaces and bars."""
    return "".join(run.printed.split())


def made(build: Any, *, logger: Any = False, **options: Any) -> Any:
    """The options of a Trainer with a new callback."""
    return lambda root: {
        "callbacks": [build()],
        "logger": Told() if logger else False,
        "log_every_n_steps": 1,
        **options,
    }


CASES: dict[str, Case] = {
    "BackboneFinetuning": Case(
        made(partial(library.BackboneFinetuning, 1, lambda epoch: 2.0, verbose=False)),
        lambda run: [group["lr"] for group in run.trainer.optimizers[0].param_groups],
        build=Rated,
    ),
    "BasePredictionWriter": Case(
        lambda root: {"callbacks": [Writes(root)]}, predictions, ("predict",)
    ),
    "BatchSizeFinder": Case(
        made(partial(library.BatchSizeFinder, "power", 1, 2, 2)),
        lambda run: run.data.batch_size,
        data=Sized,
    ),
    "Checkpoint": Case(made(Own), saved),
    "LambdaCallback": Case(
        lambda root: {
            "callbacks": [
                library.LambdaCallback(
                    on_train_epoch_end=lambda trainer, module: (root / "ended.pt").touch()
                )
            ]
        },
        lambda run: (run.root / "ended.pt").exists(),
    ),
    "LearningRateFinder": Case(
        made(partial(library.LearningRateFinder, num_training_steps=6, early_stop_threshold=None)),
        lambda run: run.callback(library.LearningRateFinder).optimal_lr.results["loss"],
        build=Rated,
    ),
    "LearningRateMonitor": Case(
        made(library.LearningRateMonitor, logger=True),
        rates,
        build=partial(Classifier, scheduled=True),
    ),
    "ModelCheckpoint": Case(
        lambda root: {
            "callbacks": [library.ModelCheckpoint(root, "{epoch}", "val_loss", save_top_k=2)]
        },
        saved,
    ),
    "ProgressBar": Case(made(Bar), lambda run: run.callback(Bar).shown),
    "RichModelSummary": Case(made(library.RichModelSummary), printed, build=Rated),
    "RichProgressBar": Case(
        made(library.RichProgressBar),
        lambda run: run.callback(library.RichProgressBar).is_enabled,
    ),
    "SpikeDetection": Case(
        lambda root: {"callbacks": [library.SpikeDetection(exclude_batches_path=root)]},
        lambda run: run.callback(library.SpikeDetection).running_mean.compute(),
    ),
    "DeviceStatsMonitor": Case(
        made(partial(library.DeviceStatsMonitor, cpu_stats=True), logger=True), logged
    ),
    "ThroughputMonitor": Case(
        made(
            partial(library.ThroughputMonitor, lambda batch: len(batch[0]), window_size=2),
            logger=True,
        ),
        logged,
        build=Rated,
    ),
    "Timer": Case(
        made(partial(library.Timer, interval="epoch")),
        lambda run: run.callback(library.Timer).time_elapsed("train") > 0,
    ),
    "TQDMProgressBar": Case(
        made(library.TQDMProgressBar),
        lambda run: run.callback(library.TQDMProgressBar).train_progress_bar.n,
    ),
}
