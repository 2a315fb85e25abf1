"""When each action of a mini-batch starts, for any schedule whose rows are patterns.

Each round, every worker whose next forward or backward has what it needs runs it, all of them at
once in numpy: so a thousand micro-batches on a thousand stages take some thousand rounds, and not
some million actions. A recomputation and the gradients of the weights wait for no other worker;
they run right before and after a backward. The tests compare this with the simulation of the
schedule itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np

from lightning_gpipe.core.plan.action import Kind
from lightning_gpipe.core.plan.rows import Pattern, Visit
from lightning_gpipe.core.plan.waves import Indices, Passing, Times, Wave


def turns(
    patterns: Sequence[Pattern], passings: Sequence[Passing], *, at_once: bool
) -> Iterator[Wave]:
    """All actions of a mini-batch, those of each worker in its order.

    Args:
        patterns: The row of each worker in brief.
        passings: What each micro-batch takes; those that take the same may be one object.
        at_once: Whether the loss is that of all micro-batches, so that no backward starts before
            the last forward has ended.

    Raises:
        RuntimeError: If the workers wait for one another.
    """
    playing = _Playing(patterns, passings)
    while not playing.forwards_ended if at_once else not playing.ended:
        yield from playing.round(backwards=not at_once)
    if at_once:
        playing.meet()
    while not playing.ended:
        yield from playing.round(backwards=True)
    yield from playing.rest()


class _Playing:
    """Where the workers are in their rows, and when they got there."""

    def __init__(self, patterns: Sequence[Pattern], passings: Sequence[Passing]) -> None:
        distinct = list({id(each): each for each in passings}.values())
        place = {id(each): k for k, each in enumerate(distinct)}
        self._kind_of = np.array([place[id(each)] for each in passings])
        self._dropped = np.array([each.again is not None for each in distinct])
        nothing = np.zeros_like(distinct[0].forward)
        self._forward = np.stack([each.forward for each in distinct])
        self._again = np.stack([nothing if e.again is None else e.again for e in distinct])
        self._backward = np.stack([each.backward for each in distinct])
        self._weights = np.stack([nothing if e.weights is None else e.weights for e in distinct])
        self._there = _visits([each.forwards for each in patterns])
        self._back = _visits([each.backwards for each in patterns])
        self._visits = self._back.shape[1]
        self._warm_up = np.array([each.warm_up for each in patterns])
        self._split = any(each.split for each in patterns)
        self._late = np.array([each.late for each in patterns])
        shape = len(passings), len(nothing)
        self._came, self._returned = np.full(shape, np.nan), np.full(shape, np.nan)
        self._f, self._b = (np.zeros(len(patterns), dtype=np.int64) for _ in range(2))
        self._free = np.zeros(len(patterns))

    @property
    def forwards_ended(self) -> bool:
        """Whether all forwards have ended."""
        return bool((self._f == self._visits).all())

    @property
    def ended(self) -> bool:
        """Whether all backwards have ended."""
        return bool((self._b == self._visits).all())

    def meet(self) -> None:
        """Let all workers wait for the last one."""
        self._free[:] = self._free.max()

    def round(self, *, backwards: bool) -> Iterator[Wave]:
        """What the workers run next that can.

        Args:
            backwards: Whether these may.
        """
        forward = self._f < np.minimum(self._visits, self._warm_up + self._b + 1)
        back = ~forward & (self._b < self._visits) & backwards
        found = [*self._forwards(np.flatnonzero(forward)), *self._backwards(np.flatnonzero(back))]
        if not found:
            raise RuntimeError("a schedule must end: its workers wait for one another.")
        yield from found

    def rest(self) -> Iterator[Wave]:
        """The gradients of the weights that are left at the end."""
        for late in range(int(self._late.max()), 0, -1) if self._split else ():
            workers = np.flatnonzero(np.minimum(self._late, self._visits) >= late)
            yield from self._weights_of(workers, np.full(len(workers), self._visits - late))

    def _forwards(self, workers: Indices) -> Iterator[Wave]:
        i, j = self._there[workers, self._f[workers]].T
        arrived = np.where(j == 0, 0.0, self._came[i, j - 1])
        ready = ~np.isnan(arrived)
        if not ready.any():
            return
        workers, i, j = workers[ready], i[ready], j[ready]
        start = np.maximum(self._free[workers], arrived[ready])
        end = self._take(workers, start, self._forward[self._kind_of[i], j])
        self._came[i, j] = end
        self._f[workers] += 1
        yield Wave(Kind.FORWARD, i, j, start, end)

    def _backwards(self, workers: Indices) -> Iterator[Wave]:
        i, j = self._back[workers, self._b[workers]].T
        last = self._came.shape[1] - 1
        arrived = np.where(j == last, self._came[i, j], self._returned[i, (j + 1) % (last + 1)])
        ready = ~np.isnan(arrived)
        if not ready.any():
            return
        workers, i, j, arrived = workers[ready], i[ready], j[ready], arrived[ready]
        yield from self._recomputations(workers, i, j)
        start = np.maximum(self._free[workers], arrived)
        end = self._take(workers, start, self._backward[self._kind_of[i], j])
        self._returned[i, j] = end
        yield Wave(Kind.BACKWARD, i, j, start, end)
        if self._split:
            due = self._b[workers] >= self._late[workers]
            yield from self._weights_of(workers[due], (self._b - self._late)[workers[due]])
        self._b[workers] += 1

    def _recomputations(self, workers: Indices, i: Indices, j: Indices) -> Iterator[Wave]:
        dropped = self._dropped[self._kind_of[i]]
        if dropped.any():
            workers, i, j = workers[dropped], i[dropped], j[dropped]
            start = self._free[workers]
            end = self._take(workers, start, self._again[self._kind_of[i], j])
            yield Wave(Kind.RECOMPUTE, i, j, start, end)

    def _weights_of(self, workers: Indices, places: Indices) -> Iterator[Wave]:
        """Those of the backwards at some places of their rows."""
        if len(workers):
            i, j = self._back[workers, places].T
            start = self._free[workers]
            end = self._take(workers, start, self._weights[self._kind_of[i], j])
            yield Wave(Kind.WEIGHTS, i, j, start, end)

    def _take(self, workers: Indices, start: Times, cost: Times) -> Times:
        """Let workers be at work from some time on, for so long each."""
        end = start + cost
        self._free[workers] = end
        return end


def _visits(rows: Sequence[Sequence[Visit]]) -> Indices:
    """The visits of each worker; of shape (workers, visits, 2)."""
    numbers = chain.from_iterable(chain.from_iterable(rows))
    return np.fromiter(numbers, dtype=np.int64).reshape(len(rows), -1, 2)
