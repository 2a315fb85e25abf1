"""The ways in which the pipeline of each model runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from torch import nn

from lightning_gpipe.core.pipeline import GPipe
from lightning_gpipe.core.schedules import ActivationCheckpointing, ByMicroBatch
from tests.models.case import Case
from tests.support.pipes import even

CHUNKS = 3


@dataclass(frozen=True)
class Setting:
    """One way to run a pipeline: by fill-drain, or with a loss for each micro-batch."""

    stages: int
    mode: ActivationCheckpointing
    training: bool
    threads: bool
    schedule: ByMicroBatch | None = None

    def __str__(self) -> str:
        training = "train" if self.training else "eval"
        schedule = "" if self.schedule is None else f", {self.schedule}"
        return (
            f"{self.stages} stages, {self.mode}, {training}{', threads' * self.threads}{schedule}"
        )


_MODES: Sequence[ActivationCheckpointing] = ("never", "except_last", "always")

#: A loss for each micro-batch, with and without recomputation and threads.
BY_MICRO_BATCH = [
    Setting(3, "never", training=True, threads=True, schedule="1f1b"),
    Setting(2, "except_last", training=True, threads=False, schedule="1f1b"),
]
#: Every number of stages with every mode, in training and evaluation; threads by turns.
ALL = [
    Setting(stages, mode, training, threads)
    for (stages, mode, training), threads in zip(
        [(n, mode, training) for n in (2, 3, 4) for mode in _MODES for training in (True, False)],
        cycle([True, False, False, True]),
        strict=False,
    )
] + BY_MICRO_BATCH
#: Every number of stages and every mode, in training and evaluation, but not with one another.
SOME = [
    Setting(2, "never", training=True, threads=True),
    Setting(3, "except_last", training=True, threads=False),
    Setting(4, "always", training=True, threads=True),
    Setting(2, "always", training=False, threads=False),
    Setting(3, "never", training=False, threads=True),
    Setting(4, "except_last", training=False, threads=False),
    BY_MICRO_BATCH[0],
]
#: For models of which each step takes seconds.
FEW = [
    Setting(3, "except_last", training=True, threads=True),
    Setting(2, "always", training=False, threads=False),
    BY_MICRO_BATCH[0],
]


def settings_of(
    case: Case, settings: Sequence[Setting], most: int | None = None
) -> Sequence[Setting]:
    """Those of the settings in which a case is run, which are so many at most."""
    if case.large:
        settings = FEW
    if most is not None and most < len(settings):
        settings = FEW[:most] if most <= len(FEW) else SOME[:most]
    return settings if case.by_micro_batch else [s for s in settings if s.schedule is None]


def piped(model: nn.Module, case: Case, setting: Setting) -> GPipe:
    """The model in a pipeline."""
    module: Any = case.module if isinstance(case.module, str) else list(case.module)
    return GPipe(
        model,
        balance_of(model, case, setting.stages),
        module=module,
        devices=["cpu"] * setting.stages,
        chunks=CHUNKS,
        activation_checkpointing=setting.mode,
        deferred_batch_norm=False,
        threads=setting.threads,
    )


def balance_of(model: nn.Module, case: Case, stages: int) -> Any:
    """As many blocks for each stage; for what is traced by its parameters."""
    if isinstance(case.module, tuple):
        return [_of(model.get_submodule(path), stages) for path in case.module]
    return _of(model.get_submodule(case.module), stages)


def _of(module: nn.Module, stages: int) -> Any:
    if isinstance(module, nn.ModuleList | nn.Sequential):
        return even(len(module), stages)
    return "parameters"
