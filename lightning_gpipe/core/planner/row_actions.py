"""The actions of a mini-batch as arrays: those of each worker in its order, worker after worker.

A thousand micro-batches on a thousand stages have millions of actions, so no action is an object.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_gpipe.core.schedules import Kind, Pattern, ScheduleKind

ROW_KINDS = (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD, Kind.WEIGHTS)
FORWARD, RECOMPUTE, BACKWARD, WEIGHTS = range(len(ROW_KINDS))

Indices = NDArray[np.int64]
Numbers = NDArray[np.int32]  # of kinds, micro-batches and stages: half as large as indices


class RowActions(NamedTuple):
    """The actions of some workers, in order.

    Each backward is preceded by a recomputation, which costs nothing if its stage has no need of
    one: so the actions do not depend on the number of micro-batches that are recomputed.
    """

    kinds: Numbers  # as indices in ``ROW_KINDS``
    i: Numbers  # micro-batches
    j: Numbers  # stages
    begins: Indices  # the index of each worker's first action, and the number of all actions

    @property
    def workers(self) -> int:
        return len(self.begins) - 1

    @property
    def worker_of_each(self) -> Indices:
        return np.repeat(np.arange(self.workers), np.diff(self.begins))

    def rows(self) -> Iterator[RowActions]:
        for first, last in pairwise(self.begins.tolist()):
            row, begins = slice(first, last), np.array([0, last - first])
            yield RowActions(self.kinds[row], self.i[row], self.j[row], begins)


def row_actions(
    order: ScheduleKind, m: int, placement: tuple[int, ...], recomputed: tuple[int, ...]
) -> RowActions:
    """Return the actions of all workers; ``recomputed`` matters where their order depends on it."""
    return _row_actions(order, m, placement, order_needs(order, recomputed))


def order_needs(order: ScheduleKind, recomputed: tuple[int, ...]) -> tuple[int, ...]:
    """Return what is recomputed if the order of actions depends on it, or else nothing."""
    return recomputed if order.definition.rows is not None else ()


@lru_cache(maxsize=1)  # of many workers they are large, and asked for again at once
def _row_actions(
    order: ScheduleKind, m: int, placement: tuple[int, ...], recomputed: tuple[int, ...]
) -> RowActions:
    if (patterns := order.definition.patterns) is not None:
        return _of_patterns(patterns(m, placement), split=order.split)
    rows = order.build(m, placement, recomputed or m).rows
    index = {kind: number for number, kind in enumerate(ROW_KINDS)}
    numbers = [(index[kind], i, j) for kind, i, j in chain.from_iterable(rows)]
    kinds, i, j = np.array(numbers, dtype=np.int32).T
    return RowActions(kinds, i, j, np.array([0, *accumulate(map(len, rows))]))


def _of_patterns(patterns: Sequence[Pattern], *, split: bool) -> RowActions:
    """Return the actions of workers whose rows are patterns, each with as many visits.

    Of v visits, before backward k come k recomputations and backwards and, up to v, warm_up + k + 1
    forwards; the gradients of the weights of k - late and those before it have come, too.
    """
    warm_up, late = (
        np.array([[getattr(pattern, name)] for pattern in patterns], dtype=np.int32)
        for name in ("warm_up", "late")
    )
    visits = len(patterns[0].forwards)
    length = (3 + split) * visits
    first = np.arange(len(patterns), dtype=np.int32)[:, None] * length
    number = np.arange(visits, dtype=np.int32)
    step, last = np.maximum(number - warm_up, 0), np.minimum(number + late, visits - 1)
    recompute = np.minimum(warm_up + number + 1, visits) + 2 * number
    places = {
        FORWARD: number + 2 * step + split * np.maximum(step - late, 0),
        RECOMPUTE: recompute + split * np.maximum(number - late, 0),
        BACKWARD: recompute + 1 + split * np.maximum(number - late, 0),
    }
    if split:
        places[WEIGHTS] = np.minimum(warm_up + last + 1, visits) + 2 * last + 2 + number
    kinds, i, j = (np.empty(len(patterns) * length, dtype=np.int32) for _ in range(3))
    forwards = np.array([pattern.forwards for pattern in patterns])
    backwards = np.array([pattern.backwards for pattern in patterns])
    for kind, place in places.items():
        place += first
        kinds[place] = kind
        i[place], j[place] = np.moveaxis(forwards if kind == FORWARD else backwards, -1, 0)
    return RowActions(kinds, i, j, np.arange(len(patterns) + 1) * length)
