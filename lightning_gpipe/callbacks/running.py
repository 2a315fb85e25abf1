"""Checks of the callbacks, and facts of a running pipeline: its best balance, its peak memory."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from math import inf

import torch
from lightning.pytorch import Trainer

from lightning_gpipe.core.balance import Place, Shift, shift_for, time_costs
from lightning_gpipe.core.pipeline import GPipe
from lightning_gpipe.core.schedules import count_recomputed
from lightning_gpipe.strategy import GPipeStrategy


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
    """Raise unless the argument is a whole number of 1 or more."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number: got {value!r}.")
    if value < 1:
        raise ValueError(f"{name} must be 1 or more: got {value}.")


def milliseconds(seconds: float) -> str:
    """Format a time to three digits, such as ``2.41 ms`` or ``1,260 ms``."""
    number = 1e3 * seconds
    return f"{number:,.0f} ms" if number >= 100 else f"{number:.3g} ms"


def best_balance(pipeline: GPipe, k: int, busy: Sequence[float]) -> Shift:
    """Return the best balance of pipelined module ``k``, whose layers were measured.

    ``busy`` has the time for which each stage is busy in a mini-batch. Raises a ValueError if no
    balance fits the memory of the devices.
    """
    profile, layout = pipeline.profiles[k], pipeline.layouts[k]
    recomputed = count_recomputed(pipeline.activation_checkpointing, profile.chunks)
    places = [Place(memory=_memory(layout.device_of(j))) for j in range(layout.n)]
    outside = layout.n - 1 if layout.around == "last" else 0
    places[outside] = replace(places[outside], taken=profile.around.held_bytes)
    return shift_for(
        time_costs(profile, recomputed), pipeline.balances[k], busy, layout.placement, places
    )


def _memory(device: torch.device) -> float:
    if device.type != "cuda":
        return inf  # shared with everything else on the host
    return float(torch.cuda.get_device_properties(device).total_memory)


def peak_memory(device: torch.device) -> float | None:
    """Return the peak in bytes since the process began; None if unknown.

    For the CPU it is the peak of the process.
    """
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # on Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else 1024 * peak)  # bytes there, KiB elsewhere
