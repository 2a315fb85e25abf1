"""The memory of stages while a mini-batch runs, by the order in which devices run actions.

A forward adds the inputs from other stages and, unless its activations are dropped, the tensors
saved for backward; a recomputation adds these later. A backward frees both. The first part of a
split one leaves some bytes until the gradients of the weights are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_gpipe.core.planner.fill_drain_times import Wave
from lightning_gpipe.core.planner.stage_cost import MicroBatchCost
from lightning_gpipe.core.schedules import Kind

FREES = frozenset({Kind.BACKWARD, Kind.WEIGHTS})  # at their ends; others add at their starts

Bytes = NDArray[np.float64]  # of shape (..., 2): of activations, and of boundaries


def memory_changes(
    kinds: Sequence[tuple[int, bool]], costs: Mapping[int, Sequence[MicroBatchCost]]
) -> Callable[[Wave], Bytes]:
    """Return a function of the bytes by which each action of a wave changes its stage's memory.

    Args:
        kinds: The number of rows of each micro-batch, and whether it is recomputed.
        costs: The costs of each stage for a micro-batch, by its number of rows.
    """
    distinct = list(dict.fromkeys(kinds))
    kind_of = np.array([distinct.index(kind) for kind in kinds])
    saved, entering, left = (
        np.array([[getattr(cost, name) for cost in costs[rows]] for rows, _ in distinct])
        for name in ("saved", "entering", "left")
    )
    dropped = np.array([[float(recomputed)] for _, recomputed in distinct])
    nothing = np.zeros_like(saved)
    of_kind: dict[Kind, Bytes] = {
        Kind.FORWARD: np.stack([(1 - dropped) * saved, entering], axis=-1),
        Kind.RECOMPUTE: np.stack([dropped * saved, nothing], axis=-1),
        Kind.BACKWARD: np.stack([left - saved, -entering], axis=-1),
        Kind.WEIGHTS: np.stack([-left, nothing], axis=-1),
    }

    def changes(wave: Wave) -> Bytes:
        changes: Bytes = of_kind[wave.kind][kind_of[wave.i], wave.j]
        return changes

    return changes


def end_and_peaks(
    waves: Iterable[Wave], changes: Callable[[Wave], Bytes], placement: Sequence[int]
) -> tuple[float, Bytes]:
    """Return the end of a mini-batch, and the bytes of each stage at the peak of its device.

    Args:
        waves: All actions; those of each worker in its order.
        changes: Returns the bytes by which they change the memory.
        placement: The worker of each stage.
    """
    worker_of = np.array(placement)
    now, at_peak = np.zeros((len(placement), 2)), np.zeros((len(placement), 2))
    total, peak = np.zeros(worker_of.max() + 1), np.zeros(worker_of.max() + 1)
    end = 0.0
    for wave in waves:
        end = max(end, float(wave.end.max()))
        change, workers = changes(wave), worker_of[wave.j]
        now[wave.j] += change
        total[workers] += change.sum(axis=1)
        risen = total > peak
        if risen.any():
            peak[risen] = total[risen]
            at_peak[risen[worker_of]] = now[risen[worker_of]]
    return end, at_peak
