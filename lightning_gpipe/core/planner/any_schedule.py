"""The start and end of each action, for any schedule whose rows are patterns.

Each round, every worker whose next forward or backward is ready runs it, all of them at once in
numpy: so a thousand micro-batches on a thousand stages take some thousand rounds instead of a
million actions. A recomputation and the gradients of the weights wait for no other worker; they run
right before and after a backward. The tests compare this with the simulation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np

from lightning_gpipe.core.planner.fill_drain_times import Indices, MicroBatchTimes, Times, Wave
from lightning_gpipe.core.schedules import Kind, Pattern, Visit


def any_schedule_times(
    patterns: Sequence[Pattern], times: Sequence[MicroBatchTimes], *, one_loss: bool
) -> Iterator[Wave]:
    """Yield all actions of a mini-batch, those of each worker in its order.

    Args:
        patterns: The row of each worker in brief.
        times: The durations of the actions on each micro-batch; equal ones may be one object.
        one_loss: Whether the mini-batch has one loss, so that no backward starts before the last
            forward has ended.
    """
    workers = _Workers(patterns, times)
    if one_loss:
        while not workers.forwards_ended:
            yield from workers.round(backwards=False)
        workers.meet()
    while not workers.backwards_ended:
        yield from workers.round(backwards=True)
    yield from workers.weights_left()


class _Workers:
    """The progress of the workers in their rows, and the times of their latest actions."""

    def __init__(self, patterns: Sequence[Pattern], times: Sequence[MicroBatchTimes]) -> None:
        distinct = list({id(kind): kind for kind in times}.values())
        place = {id(kind): k for k, kind in enumerate(distinct)}
        self._kind_of = np.array([place[id(kind)] for kind in times])
        self._dropped = np.array([kind.recomputation is not None for kind in distinct])
        nothing = np.zeros_like(distinct[0].forward)
        self._forward, self._recomputation, self._backward, self._weights = (
            np.stack([nothing if part is None else part for part in parts])
            for parts in zip(*distinct, strict=True)
        )
        self._forwards = _visits([pattern.forwards for pattern in patterns])
        self._backwards = _visits([pattern.backwards for pattern in patterns])
        self._visits = self._backwards.shape[1]
        self._warm_up = np.array([pattern.warm_up for pattern in patterns])
        self._split = distinct[0].weights is not None
        self._late = np.array([pattern.late for pattern in patterns])
        shape = len(times), len(nothing)
        # The ends of all forwards and backwards, and for each worker the numbers of those it began.
        self._forward_end, self._backward_end = np.full(shape, np.nan), np.full(shape, np.nan)
        self._f, self._b = (np.zeros(len(patterns), dtype=np.int64) for _ in range(2))
        self._free = np.zeros(len(patterns))

    @property
    def forwards_ended(self) -> bool:
        return bool((self._f == self._visits).all())

    @property
    def backwards_ended(self) -> bool:
        return bool((self._b == self._visits).all())

    def meet(self) -> None:
        """Let all workers wait for the last one."""
        self._free[:] = self._free.max()

    def round(self, *, backwards: bool) -> Iterator[Wave]:
        """Run the next forwards and, if they may run, backwards that are ready."""
        forward = self._f < np.minimum(self._visits, self._warm_up + self._b + 1)
        backward = ~forward & (self._b < self._visits) & backwards
        waves = [
            *self._run_forwards(np.flatnonzero(forward)),
            *self._run_backwards(np.flatnonzero(backward)),
        ]
        if not waves:
            raise RuntimeError("a schedule must end: its workers wait for one another.")
        yield from waves

    def weights_left(self) -> Iterator[Wave]:
        """Compute the gradients of the weights that are left at the end."""
        for late in range(int(self._late.max()), 0, -1) if self._split else ():
            workers = np.flatnonzero(np.minimum(self._late, self._visits) >= late)
            yield from self._run_weights(workers, np.full(len(workers), self._visits - late))

    def _run_forwards(self, workers: Indices) -> Iterator[Wave]:
        i, j = self._forwards[workers, self._f[workers]].T
        arrived = np.where(j == 0, 0.0, self._forward_end[i, j - 1])
        ready = ~np.isnan(arrived)
        if not ready.any():
            return
        workers, i, j = workers[ready], i[ready], j[ready]
        start = np.maximum(self._free[workers], arrived[ready])
        end = self._take(workers, start, self._forward[self._kind_of[i], j])
        self._forward_end[i, j] = end
        self._f[workers] += 1
        yield Wave(Kind.FORWARD, i, j, start, end)

    def _run_backwards(self, workers: Indices) -> Iterator[Wave]:
        i, j = self._backwards[workers, self._b[workers]].T
        n = self._forward_end.shape[1]
        after = self._backward_end[i, (j + 1) % n]
        arrived = np.where(j == n - 1, self._forward_end[i, j], after)
        ready = ~np.isnan(arrived)
        if not ready.any():
            return
        workers, i, j, arrived = workers[ready], i[ready], j[ready], arrived[ready]
        yield from self._run_recomputations(workers, i, j)
        start = np.maximum(self._free[workers], arrived)
        end = self._take(workers, start, self._backward[self._kind_of[i], j])
        self._backward_end[i, j] = end
        yield Wave(Kind.BACKWARD, i, j, start, end)
        if self._split:
            due = self._b[workers] >= self._late[workers]
            yield from self._run_weights(workers[due], (self._b - self._late)[workers[due]])
        self._b[workers] += 1

    def _run_recomputations(self, workers: Indices, i: Indices, j: Indices) -> Iterator[Wave]:
        dropped = self._dropped[self._kind_of[i]]
        if dropped.any():
            workers, i, j = workers[dropped], i[dropped], j[dropped]
            start = self._free[workers]
            end = self._take(workers, start, self._recomputation[self._kind_of[i], j])
            yield Wave(Kind.RECOMPUTE, i, j, start, end)

    def _run_weights(self, workers: Indices, places: Indices) -> Iterator[Wave]:
        """Compute the gradients of the weights for the backwards at these places of the rows."""
        if len(workers):
            i, j = self._backwards[workers, places].T
            start = self._free[workers]
            end = self._take(workers, start, self._weights[self._kind_of[i], j])
            yield Wave(Kind.WEIGHTS, i, j, start, end)

    def _take(self, workers: Indices, start: Times, cost: Times) -> Times:
        """Occupy workers from ``start`` for the time of ``cost``; returns the ends."""
        end = start + cost
        self._free[workers] = end
        return end


def _visits(rows: Sequence[Sequence[Visit]]) -> Indices:
    """The visits of each worker, of shape (workers, visits, 2)."""
    numbers = chain.from_iterable(chain.from_iterable(rows))
    return np.fromiter(numbers, dtype=np.int64).reshape(len(rows), -1, 2)
