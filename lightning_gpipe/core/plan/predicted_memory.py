"""What stages hold while a mini-batch runs, by the order in which each device runs its actions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_gpipe.core.plan.action import Kind
from lightning_gpipe.core.plan.stage_cost import StageCost
from lightning_gpipe.core.plan.waves import Wave

FREES = frozenset({Kind.BACKWARD, Kind.WEIGHTS})  # at their ends; others add at their starts

Bytes = NDArray[np.float64]  # of shape (..., 2): of activations, and of boundaries


class Changes:
    """By how many bytes what a stage holds changes with an action.

    A forward adds the inputs from other stages and, unless its activations are dropped, what is
    saved for a backward; a recomputation adds that later. A backward frees both. One that is split
    leaves something, which is freed when the gradients of the weights are computed.

    Args:
        kinds: Of each micro-batch, its number of rows and whether it is recomputed.
        costs: What each stage costs for a micro-batch, by its number of rows.
    """

    def __init__(
        self, kinds: Sequence[tuple[int, bool]], costs: Mapping[int, Sequence[StageCost]]
    ) -> None:
        distinct = list(dict.fromkeys(kinds))
        self._kind_of = np.array([distinct.index(kind) for kind in kinds])
        saved, entering, left = (
            np.array([[getattr(cost, name) for cost in costs[rows]] for rows, _ in distinct])
            for name in ("saved", "entering", "left")
        )
        dropped = np.array([[float(again)] for _, again in distinct])
        nothing = np.zeros_like(saved)
        self._of_kind: dict[Kind, Bytes] = {
            Kind.FORWARD: np.stack([(1 - dropped) * saved, entering], axis=-1),
            Kind.RECOMPUTE: np.stack([dropped * saved, nothing], axis=-1),
            Kind.BACKWARD: np.stack([left - saved, -entering], axis=-1),
            Kind.WEIGHTS: np.stack([-left, nothing], axis=-1),
        }

    @property
    def stages(self) -> int:
        """Their number."""
        return self._of_kind[Kind.FORWARD].shape[1]

    def of(self, wave: Wave) -> Bytes:
        """Those of each action of a wave."""
        found: Bytes = self._of_kind[wave.kind][self._kind_of[wave.i], wave.j]
        return found


class Peaks:
    """The end of a mini-batch, and what each stage holds when its device holds most.

    Args:
        waves: All actions; those of each worker in its order.
        changes: What they change.
        placement: The worker of each stage.

    Attributes:
        time: When the last action ends.
    """

    def __init__(self, waves: Iterable[Wave], changes: Changes, placement: Sequence[int]) -> None:
        worker_of = np.array(placement)
        now, self._at_peak = np.zeros((changes.stages, 2)), np.zeros((changes.stages, 2))
        total, peak = np.zeros(worker_of.max() + 1), np.zeros(worker_of.max() + 1)
        self.time = 0.0
        for wave in waves:
            self.time = max(self.time, float(wave.end.max()))
            change, workers = changes.of(wave), worker_of[wave.j]
            now[wave.j] += change
            total[workers] += change.sum(axis=1)
            risen = total > peak
            if risen.any():
                peak[risen] = total[risen]
                self._at_peak[risen[worker_of]] = now[risen[worker_of]]

    def of(self, j: int) -> tuple[float, float]:
        """The bytes of activations and of boundaries that stage ``j`` holds then."""
        activations, boundaries = self._at_peak[j].tolist()
        return activations, boundaries
