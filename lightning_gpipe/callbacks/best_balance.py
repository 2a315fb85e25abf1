"""The best balance of a running pipeline, by what its stages were measured to take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import torch

from lightning_gpipe.core.pipeline import GPipe
from lightning_gpipe.core.plan import Place, Shift, count_recomputed, shift_for, time_costs


def best_balance(pipeline: GPipe, k: int, busy: Sequence[float]) -> Shift:
    """The best balance of one of the modules that run as pipelines, whose layers were measured.

    Args:
        pipeline: The pipelines.
        k: The index of the module.
        busy: The time in which each stage was at work, in a mini-batch.

    Raises:
        ValueError: If no balance fits the memory of the devices.
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
    """The bytes of a device, if it has memory of its own."""
    if device.type != "cuda":
        return inf
    return float(torch.cuda.get_device_properties(device).total_memory)
