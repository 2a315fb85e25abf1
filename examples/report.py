"""Options, measurements and the final report, which all examples share.

Nothing in this module creates a pipeline, and your own script does not need it. The examples import
it as `examples.report`, so run them as modules, from the root of the repository:

    python -m examples.char_lm --help
"""

import argparse
import logging
import math
import time
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import lightning as L
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from rich.console import Console
from rich.table import Table
from typing_extensions import override

from lightning_gpipe import GPipe, GPipeStrategy

# The relative tolerance of a mean loss, for sums in another order.
ROUNDING = 1e-4

M = TypeVar("M", bound=L.LightningModule)


def options_parser(docstring: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """Return a parser of the options of all examples, with the defaults of one example."""
    parser = argparse.ArgumentParser(
        description=(docstring or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--plain", action="store_true", help="train on one device, without a pipeline")
    add("--accelerator", choices=["cpu", "gpu"], default="cpu", help="the kind of the devices")
    add("--devices", type=int, default=2, help="how many, each with one stage or several")
    add("--balance", type=balance, default="parameters", help='layers per stage, or "parameters"')
    add("--chunks", type=int, default=8, help="micro-batches per batch")
    add("--batch-size", type=int, help="rows per batch")
    add("--steps", type=int, help="batches to train on; None: all")
    add("--validation-batches", type=int, help="batches to validate on; None: all")
    add("--seed", type=int, default=0, help="of the weights and the batches")
    add("--output", type=Path, help="the folder for logs and checkpoints")
    parser.set_defaults(**defaults)
    return parser


def balance(argument: str) -> str | list[int]:
    """Return "3,3" as the list [3, 3], and a word as it is."""
    return argument if argument.isalpha() else [int(layers) for layers in argument.split(",")]


def start(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line, seed the generators, and hide irrelevant warnings."""
    options = parser.parse_args(arguments)
    L.seed_everything(options.seed, verbose=False)
    # The data are in memory or cheap to create: worker processes would compete for the cores.
    warnings.filterwarnings("ignore", ".*does not have many workers")
    # Lightning 2.6, utilities/_pytree.py, calls this under torch >= 2.9.
    warnings.filterwarnings("ignore", r".*isinstance\(treespec, LeafSpec\)", FutureWarning)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    return options


def trainer_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of the Trainer that are the same in all examples.

    The loggers write metrics.csv and TensorBoard's files into version_<n> of the output folder.
    """
    options.output.mkdir(parents=True, exist_ok=True)
    csv = CSVLogger(options.output, name="")
    return {
        "accelerator": options.accelerator,
        "devices": 1 if options.plain else options.devices,
        "limit_val_batches": options.validation_batches,
        "logger": [csv, TensorBoardLogger(options.output, name="", version=csv.version)],
        "log_every_n_steps": 10,
        "enable_model_summary": False,  # the stages are listed instead
    }


class Measurements(Callback):
    """Prints the stages, and records the cost of the last `steps` training steps.

    Timelines are only read after the training: on a GPU, reading one synchronizes with the device.
    """

    def __init__(self, steps: int = 100) -> None:
        self.seconds = deque[float](maxlen=steps)
        self.timelines = deque[Any](maxlen=steps)  # of the pipeline; none in a plain run
        self._begun = 0.0

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if (pipeline := pipeline_of(trainer)) is not None:
            Console().print(pipeline.listing())

    @override
    def on_train_batch_start(self, *_: Any) -> None:
        self._begun = time.perf_counter()

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self._begun)
        if (pipeline := pipeline_of(trainer)) is not None:
            self.timelines.append(pipeline.timeline)

    def cost(self, items: str, per_step: int) -> dict[str, str]:
        """Return the medians over the steps, as text: `items` per second, and the bubble."""
        cost = {f"{items} per second": f"{per_step / median(self.seconds):,.0f}"}
        if self.timelines:
            bubble = median(timeline.bubble for timeline in self.timelines)
            cost["bubble, measured"] = f"{bubble:.1%}"
            cost["bubble, by the schedule"] = f"{self.timelines[-1].schedule.bubble:.1%}"
        return cost


def pipeline_of(trainer: L.Trainer) -> GPipe | None:
    """Return the pipeline that `trainer` runs, or None in a plain run."""
    return trainer.strategy.pipeline if isinstance(trainer.strategy, GPipeStrategy) else None


def report(
    trainer: L.Trainer,
    model: M,
    data: L.LightningDataModule,
    best: ModelCheckpoint,
    guess: Mapping[str, float],
    cost: Mapping[str, str],
) -> M:
    """Print the metrics of the best checkpoint and the cost; return its model, reloaded.

    `trainer` computes the metrics, and a plain Trainer on one device computes them again. `guess`
    has some of the metrics for a guess that ignores the input.

    Raises:
        SystemExit: If the two validation losses differ by more than rounding.
    """
    [trained] = trainer.validate(model, data, ckpt_path=best.best_model_path, verbose=False)
    plain_trainer = L.Trainer(
        accelerator=trainer.strategy.root_device.type,
        devices=1,
        limit_val_batches=trainer.limit_val_batches,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    reloaded = type(model).load_from_checkpoint(best.best_model_path)
    [plain] = plain_trainer.validate(reloaded, data, verbose=False)

    difference = plain["val_loss"] - trained["val_loss"]
    metrics = Table("metric", "guess", "as trained", "in a plain Trainer", title="Best checkpoint")
    for name in trained:
        guessed = f"{guess[name]:.4f}" if name in guess else ""
        metrics.add_row(name, guessed, f"{trained[name]:.4f}", f"{plain[name]:.4f}")
    metrics.add_row("difference of val_loss", "", "", f"{difference:.1g}")
    costs = Table(show_header=False)
    for row in cost.items():
        costs.add_row(*row)
    console = Console()
    console.print(metrics, costs)
    console.print(f"Logs and checkpoint: {trainer.log_dir}", soft_wrap=True)
    if not math.isclose(plain["val_loss"], trained["val_loss"], rel_tol=ROUNDING):
        raise SystemExit(
            "The checkpoint must have the same validation loss in a plain Trainer, up to rounding: "
            f"got {plain['val_loss']} there, and {trained['val_loss']} as trained."
        )
    return reloaded
