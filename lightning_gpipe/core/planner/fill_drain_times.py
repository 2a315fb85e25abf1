"""The start and end of each action, for fill-drain with a stage on each device.

The simulator goes from one action to the next, so a thousand micro-batches on a thousand stages
take it minutes. But a micro-batch goes through the stages like a wave: a stage runs it when it has
ended the one before, and when the stage before has ended this one::

    end[i, j] = max(end[i - 1, j], end[i, j - 1]) + cost[i, j]

With C[j], the sum of the costs of this micro-batch up to stage j, this is a running maximum, ::

    end[i, j] = C[j] + max over l <= j of (end[i - 1, l] - C[l - 1])

which numpy computes for all stages at once. Backward is the same from the last stage to the first;
a recomputation, which needs nothing from another stage, starts as soon as its stage is free, and so
do the gradients of the weights, for which nobody waits. The tests compare this with the simulation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_gpipe.core.schedules import Kind

Times = NDArray[np.float64]  # one for each stage, or for each action
Indices = NDArray[np.int64]


class MicroBatchTimes(NamedTuple):
    """The duration of each action on a micro-batch, on each stage.

    Attributes:
        forward: The forward.
        recomputation: The recomputation; None if there is none.
        backward: The backward.
        weights: The gradients of the weights; None if they are a part of backward.
    """

    forward: Times
    recomputation: Times | None
    backward: Times
    weights: Times | None = None


class Wave(NamedTuple):
    """Actions of one kind, at most one for each worker.

    Attributes:
        kind: The kind of the actions.
        i, j: The micro-batch and the stage of each.
        start, end: The times of each; the mini-batch starts at 0.
    """

    kind: Kind
    i: Indices
    j: Indices
    start: Times
    end: Times


def fill_drain_times(times: Sequence[MicroBatchTimes]) -> Iterator[Wave]:
    """Yield all actions of a mini-batch, in the order in which each stage runs them."""
    n = len(times[0].forward)
    stages, free = np.arange(n), np.zeros(n)

    def wave(kind: Kind, i: int, start: Times, end: Times) -> Wave:
        return Wave(kind, np.full(n, i), stages, start, end)

    for i, costs in enumerate(times):
        start, free = _through(free, costs.forward)
        yield wave(Kind.FORWARD, i, start, free)
    free = np.full_like(free, free.max())  # the caller has had its turn
    for i in reversed(range(len(times))):
        _, recomputation, backward, weights = times[i]
        if recomputation is not None:
            yield wave(Kind.RECOMPUTE, i, free, free + recomputation)
            free = free + recomputation
        start, end = _through(free[::-1], backward[::-1])
        free = end[::-1]
        yield wave(Kind.BACKWARD, i, start[::-1], free)
        if weights is not None:
            yield wave(Kind.WEIGHTS, i, free, free + weights)
            free = free + weights


def _through(free: Times, costs: Times) -> tuple[Times, Times]:
    """The start and end on each stage, which must be free, and needs the stage before.

    Starts are no sums of costs, so that no stage starts before it is free by a rounding error.
    """
    up_to = np.cumsum(costs)
    end = up_to + np.maximum.accumulate(free - (up_to - costs))
    start = free.copy()
    np.maximum(free[1:], end[:-1], out=start[1:])
    return start, start + costs
