"""The best balance of a running pipeline, from the measured times of its stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import torch

from lightning_gpipe.core.balance import Place, Shift, shift_for, time_costs
from lightning_gpipe.core.pipeline import GPipe
from lightning_gpipe.core.schedules import count_recomputed


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
