"""The memory of workers at the peaks of their rows.

A worker runs its row in order, however long it waits, so what it holds follows from the row alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from lightning_gpipe.core.planner.action_costs import ActionCosts, Bytes
from lightning_gpipe.core.planner.row_actions import ROW_KINDS, RowActions, row_actions
from lightning_gpipe.core.schedules import Kind, ScheduleKind

_CHANGE = {Kind.FORWARD: 1, Kind.BACKWARD: -1}  # of the micro-batches that are alive


def peak_of(row: RowActions, costs: ActionCosts) -> float:
    """Return the most bytes that the actions of a worker hold at once, and those on their way."""
    return float(costs.total_changes(row).cumsum().max()) + costs.under_way(row.j)


def bytes_at_peaks(actions: RowActions, costs: ActionCosts) -> Bytes:
    """Return the bytes of each stage at the peak of its worker, without those on their way."""
    at_peak = np.zeros((costs.stages, 2))
    for row in actions.rows():
        changes = costs.changes(row)
        until = (changes[:, 0] + changes[:, 1]).cumsum().argmax() + 1
        for column in range(2):
            at_peak[:, column] += np.bincount(
                row.j[:until], changes[:until, column], minlength=costs.stages
            )
    return at_peak


def least_number(
    row: RowActions,
    costs: Callable[[int], ActionCosts],
    most: int,
    room: float,
    guess: int = 0,
) -> int:
    """Return the least number whose costs fit, or ``most``; the search begins at a neighbour's."""
    least, guess, step = 0, min(guess, most), 1
    while least < most:
        if peak_of(row, costs(guess)) <= room:
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
