"""The time of each action and the bytes that it adds or frees, as arrays for numpy.

A forward adds the inputs from other stages and, unless its activations are dropped, the tensors
saved for backward; a recomputation adds these later. A backward frees both. The first part of a
split one leaves some bytes until the gradients of the weights are computed.

Activations that wait on the host are on the device only for the action at work, and on their way,
beside what is computed: an action takes as long as the longer of both. If those of some
micro-batches wait there, each has a share of that.

A worker runs its row in order, however long it waits, so what it holds follows from the row alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lightning_gpipe.core.balance import Place
from lightning_gpipe.core.planner.row_actions import ROW_KINDS, Numbers, RowActions, row_actions
from lightning_gpipe.core.planner.stage_cost import MicroBatchCost
from lightning_gpipe.core.schedules import Kind, ScheduleKind

Times = NDArray[np.float64]  # one for each action
Bytes = NDArray[np.float64]  # of shape (..., 2): of activations, and of boundaries
_CHANGE = {Kind.FORWARD: 1, Kind.BACKWARD: -1}  # of the micro-batches that are alive


class ActionCosts:
    """The costs of all actions of a mini-batch.

    Args:
        costs: The costs of each stage for a micro-batch, by its number of rows.
        rows: The number of rows of each micro-batch.
        recomputed: The number of micro-batches that each stage recomputes, which are the first.
        places: The device of each stage.
        transfers: The times in which the weights of each stage come from the host, and in which
            their gradients go there; empty if they are on the devices. The attribute is an array of
            shape (stages, 2), or None.
        offloaded: The share of each stage's micro-batches whose activations wait on the host.
        under_way: Of these, how many each stage has on its device at once.
    """

    def __init__(
        self,
        costs: Mapping[int, Sequence[MicroBatchCost]],
        rows: Sequence[int],
        recomputed: Sequence[int],
        places: Sequence[Place],
        *,
        transfers: Sequence[tuple[float, float]] = (),
        offloaded: Sequence[float] = (),
        under_way: Sequence[float] = (),
    ) -> None:
        sizes = list(costs)
        self.micro_batches, self.stages = len(rows), len(recomputed)
        self._size_of = np.array([sizes.index(number) for number in rows], dtype=np.int32)
        self._recomputed = np.array(recomputed, dtype=np.int32)
        self.transfers = np.array(transfers) if transfers else None
        speeds = np.array([place.speed for place in places])

        def each(name: str) -> NDArray[np.float64]:
            return np.array([[getattr(cost, name) for cost in costs[size]] for size in sizes])

        forward, dropping, backward, weights = (
            each(name) / speeds for name in ("forward", "dropping", "backward", "weights")
        )
        saved, entering, left = map(each, ("saved", "entering", "left"))
        nothing = np.zeros_like(forward)
        keeping, again = backward, backward
        away = np.array(offloaded or nothing[0])
        whole = np.stack([saved + entering, entering])
        self._under_way = np.array(under_way or nothing[0]) * whole.max(axis=1)
        self._moves = bool(away.any())
        if self._moves:
            moved, moved_inputs = away * whole / np.array([place.host_speed for place in places])
            forward, dropping = np.maximum(forward, moved), np.maximum(dropping, moved_inputs)
            keeping, again = np.maximum(backward, moved), np.maximum(backward, moved_inputs)
        kept, inputs = (1 - away) * saved, (1 - away) * entering
        # By the number of rows, whether it is recomputed, and the stage.
        times: dict[Kind, NDArray[np.float64]] = {
            Kind.FORWARD: np.stack([forward, dropping], axis=1),
            Kind.RECOMPUTE: np.stack([nothing, each("forward") / speeds], axis=1),
            Kind.BACKWARD: np.stack([keeping, again], axis=1),
            Kind.WEIGHTS: np.stack([weights, weights], axis=1),
        }
        changes: dict[Kind, Bytes] = {
            Kind.FORWARD: _pairs(kept=(kept, inputs), dropped=(nothing, inputs)),
            Kind.RECOMPUTE: _pairs(kept=(nothing, nothing), dropped=(saved, nothing)),
            Kind.BACKWARD: _pairs(kept=(left - kept, -inputs), dropped=(left - saved, -inputs)),
            Kind.WEIGHTS: _pairs(*[(-left, nothing)] * 2),
        }
        self._times = np.concatenate([times[kind].ravel() for kind in ROW_KINDS])
        self._changes = np.concatenate([changes[kind].reshape(-1, 2) for kind in ROW_KINDS])
        self._total_changes = self._changes.sum(axis=1)

    def under_way(self, j: int | Numbers) -> float:
        """Return the most bytes of activations on their way to and from the host, of any stage."""
        if not self._moves:
            return 0.0
        all_recomputed = (self._recomputed[j] >= self.micro_batches).astype(np.int8)
        return float(np.max(self._under_way[all_recomputed, j]))

    def recomputing(self, number: int) -> ActionCosts:
        other = copy(self)
        other._recomputed = np.full_like(self._recomputed, number)
        return other

    def times(self, actions: RowActions) -> Times:
        return self._times.take(self._places(actions))

    def changes(self, actions: RowActions) -> Bytes:
        """Return the bytes by which each action changes its stage's memory."""
        return self._changes.take(self._places(actions), axis=0)

    def total_changes(self, actions: RowActions) -> NDArray[np.float64]:
        """Return the bytes by which each action changes its stage's memory, boundaries included."""
        return self._total_changes.take(self._places(actions))

    def peak_of(self, row: RowActions) -> float:
        """Return the most bytes that a worker's actions hold at once, and those on their way."""
        return float(self.total_changes(row).cumsum().max()) + self.under_way(row.j)

    def at_peaks(self, actions: RowActions) -> Bytes:
        """Return the bytes of each stage at the peak of its worker, without those on their way."""
        at_peak = np.zeros((self.stages, 2))
        for row in actions.rows():
            changes = self.changes(row)
            until = (changes[:, 0] + changes[:, 1]).cumsum().argmax() + 1
            for column in range(2):
                at_peak[:, column] += np.bincount(
                    row.j[:until], changes[:until, column], minlength=self.stages
                )
        return at_peak

    def _places(self, actions: RowActions) -> Numbers:
        kinds, i, j, _ = actions
        sizes = len(self._total_changes) // (len(ROW_KINDS) * 2 * self.stages)
        places = kinds if sizes == 1 else kinds * np.int32(sizes) + self._size_of.take(i)
        recomputes = i < self._recomputed.take(j)
        indices: Numbers = (2 * places + recomputes) * np.int32(self.stages) + j
        return indices


def _pairs(
    kept: tuple[NDArray[np.float64], NDArray[np.float64]],
    dropped: tuple[NDArray[np.float64], NDArray[np.float64]],
) -> Bytes:
    return np.stack([np.stack(kept, axis=-1), np.stack(dropped, axis=-1)], axis=1)


def least_number(
    row: RowActions, costs: Callable[[int], ActionCosts], most: int, room: float, guess: int = 0
) -> int:
    """Return the least number whose costs fit, or ``most``; the search begins at a neighbour's."""
    least, guess, step = 0, min(guess, most), 1
    while least < most:
        if costs(guess).peak_of(row) <= room:
            most, guess = guess, guess - step
        else:
            least, guess = guess + 1, guess + step
        if not least <= guess < most:
            guess = (least + most) // 2
        step *= 2
    return most


@lru_cache(maxsize=64)
def most_alive(order: ScheduleKind, m: int, placement: tuple[int, ...]) -> tuple[int, ...]:
    """Return for each stage the most micro-batches between their forward and their backward."""
    if not order.by_micro_batch:
        return (m,) * len(placement)
    actions = row_actions(order, m, placement, (0,) * len(placement))
    by_stage = actions.j.argsort(kind="stable")
    changes = np.array([_CHANGE.get(kind, 0) for kind in ROW_KINDS])
    alive = changes[actions.kinds[by_stage]].cumsum()  # none is when a stage has ended
    firsts = np.searchsorted(actions.j[by_stage], np.arange(len(placement)))
    return tuple(np.maximum.reduceat(alive, firsts).tolist())
