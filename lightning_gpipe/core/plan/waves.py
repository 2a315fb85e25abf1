"""When each action of a mini-batch starts, for fill-drain with a stage on each device.

The simulator goes from one action to the next, so a thousand micro-batches on a thousand stages
take it minutes. But a micro-batch goes through the stages like a wave: a stage takes it when it has
done with the one before, and when the stage before has done with this one::

    end[i, j] = max(end[i - 1, j], end[i, j - 1]) + cost[i, j]

With C[j], what the stages up to j take for this micro-batch, this is a running maximum, ::

    end[i, j] = C[j] + max over l <= j of (end[i - 1, l] - C[l - 1])

which numpy finds for all stages at once. Backward is the same from the last stage to the first; a
recomputation, which needs nothing from another stage, starts as soon as its stage is free, and so
do the gradients of the weights, for which nobody waits. The tests compare this with the simulation
of the schedule itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_gpipe.core.plan.action import Kind

Times = NDArray[np.float64]  # one for each stage, or for each action
Indices = NDArray[np.int64]


class Passing(NamedTuple):
    """What a micro-batch takes on each stage.

    Attributes:
        forward: Its forward.
        again: Its recomputation; None if it is not recomputed.
        backward: Its backward.
        weights: The gradients of the weights; None if they are a part of backward.
    """

    forward: Times
    again: Times | None
    backward: Times
    weights: Times | None = None


class Wave(NamedTuple):
    """Actions of one kind, at most one for each worker.

    Attributes:
        kind: What they do.
        i: The micro-batch of each.
        j: The stage of each.
        start: When each starts; the mini-batch begins at 0.
        end: When each ends.
    """

    kind: Kind
    i: Indices
    j: Indices
    start: Times
    end: Times


def waves(passings: Sequence[Passing]) -> Iterator[Wave]:
    """All actions of a mini-batch, in the order in which each stage runs them.

    Args:
        passings: What each micro-batch takes.
    """
    n = len(passings[0].forward)
    stages, free = np.arange(n), np.zeros(n)

    def wave(kind: Kind, i: int, start: Times, end: Times) -> Wave:
        return Wave(kind, np.full(n, i), stages, start, end)

    for i, costs in enumerate(passings):
        start, free = _through(free, costs.forward)
        yield wave(Kind.FORWARD, i, start, free)
    free = np.full_like(free, free.max())  # the caller has had its turn
    for i in reversed(range(len(passings))):
        again, backward, weights = passings[i][1:]
        if again is not None:
            yield wave(Kind.RECOMPUTE, i, free, free + again)
            free = free + again
        start, end = _through(free[::-1], backward[::-1])
        free = end[::-1]
        yield wave(Kind.BACKWARD, i, start[::-1], free)
        if weights is not None:
            yield wave(Kind.WEIGHTS, i, free, free + weights)
            free = free + weights


def _through(free: Times, costs: Times) -> tuple[Times, Times]:
    """When each stage in turn starts and ends, that is free at some time, and needs the one before.

    Starts are no sum of costs, so that no stage starts before it is free by a rounding error.
    """
    up_to = np.cumsum(costs)
    end = up_to + np.maximum.accumulate(free - (up_to - costs))
    start = free.copy()
    np.maximum(free[1:], end[:-1], out=start[1:])
    return start, start + costs
