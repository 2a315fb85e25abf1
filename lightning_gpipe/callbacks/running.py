"""Checks of the callbacks, and facts of a running pipeline: its steps, peak memory."""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch
from lightning.pytorch import Trainer

from lightning_gpipe.core.pipeline import GPipe
from lightning_gpipe.core.show import Slice, TracedRun
from lightning_gpipe.strategy import GPipeStrategy

BETWEEN = "between steps"


class RecordedStep(NamedTuple):
    """A step of a fit."""

    number: int
    runs: list[TracedRun]  # the actions of each mini-batch
    caller: list[Slice]
    seconds: float  # in which a pipeline ran

    @property
    def length(self) -> float:
        """The time from the end of the step before to the end of this one, in seconds."""
        return self.caller[-1].end - self.caller[0].start

    def __str__(self) -> str:
        before = sum(x.end - x.start for x in self.caller if x.name == BETWEEN)
        rest = self.length - self.seconds - before
        return (
            f"step {self.number} took {milliseconds(self.length)}: pipeline "
            f"{milliseconds(self.seconds)}; loading, callbacks and logging before it "
            f"{milliseconds(before)}; loss, hooks and optimizer {milliseconds(rest)}"
        )


def strategy_of(trainer: Trainer, callback: object) -> GPipeStrategy:
    """Return the Trainer's strategy, or raise a TypeError if it makes no pipeline."""
    strategy = trainer.strategy
    if isinstance(strategy, GPipeStrategy):
        return strategy
    raise TypeError(
        f"{type(callback).__name__} is for a pipeline: got a Trainer with "
        f"{type(strategy).__name__}. Write Trainer(strategy=GPipeStrategy(...)), or leave out the "
        "callback."
    )


def pipeline_of(trainer: Trainer, callback: object) -> GPipe:
    """Return the pipeline of a Trainer that has been set up."""
    pipeline = strategy_of(trainer, callback).pipeline
    assert pipeline is not None, "there is one from setup to teardown"
    return pipeline


def check_positive(name: str, value: object) -> None:
    """Raise unless the argument is an integer of 1 or more."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number: got {value!r}.")
    if value < 1:
        raise ValueError(f"{name} must be 1 or more: got {value}.")


def milliseconds(seconds: float) -> str:
    """Format a time to three digits, such as ``2.41 ms`` or ``1,260 ms``."""
    number = 1e3 * seconds
    return f"{number:,.0f} ms" if number >= 100 else f"{number:.3g} ms"


def peak_memory(device: torch.device) -> float | None:
    """Return the peak in bytes since the process began, on CPU the process's; None if unknown."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # on Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else 1024 * peak)  # bytes there, KiB elsewhere
