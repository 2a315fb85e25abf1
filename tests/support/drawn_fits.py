"""Drawn fits: a drawn LightningModule, a Trainer's settings, and how its parts are pipelined.

A :class:`Fit` is a value that prints. :func:`outcome` runs it, as it is drawn or in a plain
Trainer, and returns all that is to be the same: what was trained, saved, logged and decided.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from lightning.pytorch import callbacks as library
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from torch.utils.data import DataLoader

from lightning_gpipe import GPipeStrategy
from tests.support.drawn_modules import Drawn, Model, models, rows
from tests.support.drawn_parts import LAYERS, MIXING_LAYERS, OPERATORS, parts
from tests.support.lightning_modules import trainer
from tests.support.pipes import MODES
from tests.support.resumable import SavesAt
from tests.support.trainers import RankEnvironment

KEY = "lightning_gpipe"  # of the entry of a checkpoint that a plain Trainer ignores

CALLBACKS: dict[str, Callable[[], Callback]] = {
    "best": lambda: library.ModelCheckpoint(monitor="val_loss", save_top_k=2, save_last=True),
    "every step": lambda: library.ModelCheckpoint(every_n_train_steps=2, save_top_k=-1),
    "stopping": lambda: library.EarlyStopping("val_loss", patience=0, min_delta=0.01),
    "training stopping": lambda: library.EarlyStopping(
        "train", patience=0, min_delta=0.01, check_on_train_epoch_end=True
    ),
    "averages": lambda: library.StochasticWeightAveraging(0.05, swa_epoch_start=1),
    "rates": lambda: library.LearningRateMonitor(),
}


if hasattr(library, "EMAWeightAveraging"):  # new in Lightning 2.6
    CALLBACKS["moving averages"] = lambda: library.EMAWeightAveraging(decay=0.8)

TRAINERS: dict[str, list[Any]] = {
    "accumulate_grad_batches": [1, 1, 2, 3],
    "gradient_clip_val": [None, 0.1, 0.5],
    "gradient_clip_algorithm": ["norm", "value"],
    "max_epochs": [1, 2, 2],
    "val_check_interval": [1.0, 0.5],
    "num_sanity_val_steps": [0, 1],
}
PRECISIONS: dict[Any, float] = {"64-true": 1e-9, "32-true": 1e-4, "bf16-mixed": 1e-2}  # how exact
# The numbers of stages and devices with which each schedule runs.
Sizes = Mapping[str, Sequence[tuple[int, int]]]
STAGES: Sizes = {
    "fill_drain": [(2, 2), (3, 3), (4, 2)],
    "1f1b": [(2, 2), (3, 3), (4, 2)],
    "zero_bubble": [(2, 2), (3, 3)],
    "zero_bubble_v": [(4, 2)],
    "v_half": [(4, 2)],
    "v_min": [(4, 2)],
}
SINGLE_STEPS = "averages", "every step"  # of automatic optimization


@dataclass(frozen=True)
class Fit:
    """A LightningModule, its pipelines, and a Trainer.

    Attributes:
        strategy: Options of the strategy.
        callbacks: Names in :data:`CALLBACKS`.
        rows: The number of rows to train on.
        size: Of a batch.
        resumed: The optimizer step after which the fit is saved, and resumed by another Trainer.
    """

    model: Model
    devices: int
    strategy: tuple[tuple[str, Any], ...]
    callbacks: tuple[str, ...]
    rows: int
    size: int
    shuffle: bool
    resumed: int | None
    trainer: tuple[tuple[str, Any], ...]
    seed: int

    @property
    def by_rows(self) -> bool:
        """Whether each micro-batch has a loss."""
        return dict(self.strategy)["schedule"] != "fill_drain"

    @property
    def exactness(self) -> float:
        """The difference that another order of sums may make."""
        return PRECISIONS[dict(self.trainer)["precision"]]

    def but(self, **options: Any) -> Fit:
        """The fit with other options of the strategy."""
        return replace(self, strategy=tuple((dict(self.strategy) | options).items()))

    def make_strategy(self, **options: Any) -> GPipeStrategy:
        """A new strategy with other ``options``, for one Trainer."""
        paths: Any = [f"parts.{k}{part.path}" for k, part in enumerate(self.model.parts)]
        balances: Any = [part.balance for part in self.model.parts]
        if len(paths) == 1:
            (paths,), (balances,) = paths, balances
        return GPipeStrategy(balances, module=paths, **dict(self.strategy), **options)


@st.composite
def fits(
    draw: st.DrawFn,
    operators: Sequence[str] = tuple(OPERATORS),
    layers: Sequence[str] = tuple(LAYERS),
    frontends: Sequence[str] = ("sequential", "loop", "traced"),
    sizes: Sizes = STAGES,
) -> Fit:
    """Fits of these words that nothing refuses, but for rows that operators mix."""
    schedule = draw(st.sampled_from(sorted(sizes)))
    stages, devices = draw(st.sampled_from(sizes[schedule]))
    interleaved = schedule == "1f1b" and stages > devices
    chunks = draw(st.sampled_from(sorted({devices, 4})) if interleaved else st.integers(1, 5))
    strategy = {
        "schedule": schedule,
        "chunks": chunks,
        "activation_checkpointing": draw(
            st.sampled_from([None, *MODES, [k % 3 for k in range(stages)]])
        ),
        "threads": draw(st.sampled_from([True, False, "auto"])),
        "split_backward": draw(st.booleans()),
        "verify": draw(st.sampled_from(["sample", "sample", True, False])),
        "around": draw(st.sampled_from(["last", "first"])),
    }
    if chunks == 1 and not strategy["verify"]:
        layers = [*layers, *MIXING_LAYERS]
    by_rows = schedule != "fill_drain"  # each micro-batch has a loss
    several = st.lists(
        parts(stages, operators, layers, frontends), min_size=1, max_size=1 if by_rows else 2
    )
    model = draw(models(several.map(tuple), by_rows=by_rows))
    options = {name: draw(st.sampled_from(values)) for name, values in TRAINERS.items()}
    if model.loss == "manual":
        options |= {"accumulate_grad_batches": 1, "gradient_clip_val": None}
    unfit = {
        *(SINGLE_STEPS if model.loss == "manual" or options["accumulate_grad_batches"] > 1 else ()),
        *(["averages"] if model.scheduler == "steps" else ()),
    }
    precisions = ["64-true", "64-true", "32-true", *(["bf16-mixed"] if chunks == 1 else [])]
    callbacks = st.sampled_from(sorted(CALLBACKS.keys() - unfit))
    resumed = draw(st.sampled_from([None, None, 1, 2]))
    return Fit(
        model,
        devices,
        tuple(strategy.items()),
        tuple(draw(st.lists(callbacks, max_size=3, unique=True))),
        rows=draw(st.integers(5, 13)),
        size=draw(st.integers(2, 7)),
        # A pipeline's checkpoint has the state of the generator, which draws the order.
        shuffle=draw(st.booleans()) and resumed is None,
        resumed=resumed,
        trainer=(*options.items(), ("precision", draw(st.sampled_from(precisions)))),
        seed=draw(st.integers(0, 9999)),
    )


class History(Logger):
    """Keeps what a Trainer logs."""

    name = version = "history"

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Any] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.entries.append([step, dict(metrics)])

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


class Record(Callback):
    """Keeps what a callback can see after each step."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any
    ) -> None:
        self.seen.append([trainer.global_step, dict(trainer.callback_metrics), outputs])

    def on_before_optimizer_step(self, trainer: L.Trainer, module: Any, optimizer: Any) -> None:
        gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        self.seen.append({name: grad.clone() for name, grad in gradients.items()})


class Outcome(NamedTuple):
    """What came of a fit, as trees."""

    trained: list[Any]
    logged: list[Any]  # in single precision, as Lightning does it


def outcome(
    fit: Fit,
    root: Path,
    *,
    plain: bool = False,
    processes: dict[str, Any] | None = None,
    machines: int = 1,
) -> Outcome:
    """Run a fit, with or without its strategy, or in a rank with options for its ``processes``."""
    found, checkpoint = Outcome([], []), root / "resumed.ckpt"
    for _ in range(1 if fit.resumed is None else 2):
        options: dict[str, Any] = {}
        if not plain:
            strategy = fit.make_strategy(**processes or {})
            devices = fit.devices * strategy.data_parallel_size // machines
            options = {"strategy": strategy, "devices": devices, "num_nodes": machines}
        if processes is not None:
            options["plugins"] = [RankEnvironment(dist.get_world_size() // machines)]
        model, history, record = _fitted(fit, root, checkpoint, options)
        made = model.trainer
        saved = torch.load(root / "last.ckpt", weights_only=False)
        optimizers = list(map(_in_order, saved["optimizer_states"]))
        found.trained.append([model.state_dict(), saved["state_dict"], optimizers])
        found.trained.append([saved["lr_schedulers"], made.global_step, made.current_epoch])
        found.logged.append([record.seen, history.entries, dict(made.callback_metrics)])
        found.logged.append([saved["loops"], decisions(made), sorted(saved.keys() - {KEY})])
    return found


def _in_order(optimizer: dict[str, Any]) -> dict[str, Any]:
    """A state with its parameters in order: that of their first gradients is of no matter."""
    return {**optimizer, "state": dict(sorted(optimizer["state"].items()))}


def _fitted(
    fit: Fit, root: Path, checkpoint: Path, options: dict[str, Any]
) -> tuple[Drawn, History, Record]:
    resumes = checkpoint.exists()
    torch.manual_seed(fit.seed)
    model, history, record = Drawn(fit.model), History(), Record()
    callbacks = [record, *(CALLBACKS[name]() for name in fit.callbacks)]
    if fit.resumed is not None and not resumes:
        callbacks.append(SavesAt(checkpoint, step=fit.resumed))
    made = trainer(
        root,
        logger=history,
        callbacks=callbacks,
        enable_checkpointing=any(isinstance(each, library.Checkpoint) for each in callbacks),
        log_every_n_steps=1,
        **dict(fit.trainer),
        **options,
    )
    train: Any = rows(fit.rows, seed=1)
    val: Any = rows(4, seed=2)
    made.fit(
        model,
        DataLoader(train, fit.size, shuffle=fit.shuffle),
        DataLoader(val, 3),
        ckpt_path=checkpoint if resumes else None,
    )
    made.save_checkpoint(root / "last.ckpt")
    return model, history, record


def decisions(made: L.Trainer) -> list[Any]:
    """What the Trainer's callbacks decided."""
    found: list[Any] = []
    for each in made.callbacks:  # type: ignore[attr-defined]  # of Trainers
        if isinstance(each, library.EarlyStopping):
            found.append(each.state_dict())
        elif isinstance(each, library.ModelCheckpoint):
            best = {Path(path).name: score for path, score in each.best_k_models.items()}
            found.append([best, Path(each.best_model_path).name, each.best_model_score])
    return found
