"""The ways in which the pipeline of each model runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from torch import nn

from lightning_gpipe.core.pipeline import GPipe
from lightning_gpipe.core.schedules import ActivationCheckpointing
from tests.models.case import Case
from tests.support.pipes import even

CHUNKS = 3


@dataclass(frozen=True)
class Setting:
    """One way to run a pipeline."""

    stages: int
    mode: ActivationCheckpointing
    training: bool
    threads: bool

    def __str__(self) -> str:
        training = "train" if self.training else "eval"
        return f"{self.stages} stages, {self.mode}, {training}{', threads' * self.threads}"


_MODES: Sequence[ActivationCheckpointing] = ("never", "except_last", "always")

#: Every number of stages with every mode, in training and evaluation; threads by turns.
ALL = [
    Setting(stages, mode, training, threads)
    for (stages, mode, training), threads in zip(
        [(n, mode, training) for n in (2, 3, 4) for mode in _MODES for training in (True, False)],
        cycle([True, False, False, True]),
        strict=False,
    )
]
#: Every number of stages and every mode, in training and evaluation, but not with one another.
SOME = [
    Setting(2, "never", training=True, threads=True),
    Setting(3, "except_last", training=True, threads=False),
    Setting(4, "always", training=True, threads=True),
    Setting(2, "always", training=False, threads=False),
    Setting(3, "never", training=False, threads=True),
    Setting(4, "except_last", training=False, threads=False),
]


#: For models of which each step takes seconds.
FEW = [
    Setting(3, "except_last", training=True, threads=True),
    Setting(2, "always", training=False, threads=False),
]


def settings_of(
    case: Case, settings: Sequence[Setting], most: int | None = None
) -> Sequence[Setting]:
    """Those of the settings in which a case is run, which are so many at most."""
    if case.large:
        settings = FEW
    if most is not None and most < len(settings):
        settings = FEW[:most] if most <= len(FEW) else SOME[:most]
    return settings


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
