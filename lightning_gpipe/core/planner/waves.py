"""Simulates a mini-batch in numpy: the start and end of each action, and the memory of each stage.

Each round, every worker whose next forward or backward is ready runs it, all of them at once: so a
thousand micro-batches on a thousand stages take some thousand rounds instead of a million actions.
Schedules whose rows are no patterns are simulated action by action.
A recomputation and the gradients of the weights wait for no other worker; they run right before and
after a backward. The tests compare this with the simulation of the schedule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from lightning_gpipe.core.planner.action_costs import ActionCosts, Bytes, Indices, Times
from lightning_gpipe.core.schedules import Action, Kind, Pattern, Schedule, Visit

FREES = frozenset({Kind.BACKWARD, Kind.WEIGHTS})  # at their ends; others add at their starts


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


def waves(
    patterns: Sequence[Pattern], costs: ActionCosts, *, one_loss: bool, split: bool
) -> Iterator[Wave]:
    """Yield all actions of a mini-batch, those of each worker in its order.

    Args:
        patterns: The row of each worker in brief.
        costs: The durations of the actions.
        one_loss: Whether the mini-batch has one loss, so that no backward starts before the last
            forward has ended.
        split: Whether the gradients of the weights are actions of their own.
    """
    workers = _Workers(patterns, costs, split)
    if one_loss:
        while not workers.ended(Kind.FORWARD):
            yield from workers.round(backwards=False)
        workers.meet()
    while not workers.ended(Kind.BACKWARD):
        yield from workers.round(backwards=True)
    yield from workers.weights_left()


def waves_of(schedule: Schedule, costs: ActionCosts) -> Iterator[Wave]:
    """Yield the actions of a schedule without patterns, those of each worker in its order."""

    def indices(action: Action) -> tuple[Indices, Indices]:
        return np.array([action.i]), np.array([action.j])

    def time(action: Action) -> float:
        return 0.0 if action.by_caller else float(costs.times(action.kind, *indices(action))[0])

    simulation = schedule.simulate(time)
    for action in sorted(chain(*schedule.rows), key=simulation.start.__getitem__):
        start, end = simulation.start[action], simulation.end[action]
        yield Wave(action.kind, *indices(action), np.array([start]), np.array([end]))


class _Workers:
    """The progress of the workers in their rows, and the times of their latest actions."""

    def __init__(self, patterns: Sequence[Pattern], costs: ActionCosts, split: bool) -> None:
        self._costs = costs
        self._split = split
        self._visits = {
            Kind.FORWARD: _visits([pattern.forwards for pattern in patterns]),
            Kind.BACKWARD: _visits([pattern.backwards for pattern in patterns]),
        }
        self._number = self._visits[Kind.BACKWARD].shape[1]
        self._warm_up = np.array([pattern.warm_up for pattern in patterns])
        self._late = np.array([pattern.late for pattern in patterns])
        # When micro-batches reach each stage, and come back to each, the last first.
        self._last = 2 * costs.stages - 1
        self._arrival = np.full((costs.micro_batches, self._last + 2), np.nan)
        self._arrival[:, 0] = 0.0
        # The numbers of forwards and backwards that each worker began, and when it is free.
        self._begun = {kind: np.zeros(len(patterns), dtype=np.int64) for kind in self._visits}
        self._free = np.zeros(len(patterns))
        self._weights: _Weights | None = None
        if costs.transfers is not None:
            self._weights = _Weights(len(patterns), costs.transfers[:, 0])

    def ended(self, kind: Kind) -> bool:
        """Return True if all actions of a kind have ended."""
        return bool((self._begun[kind] == self._number).all())

    def meet(self) -> None:
        """Let all workers wait for the last one."""
        self._free[:] = self._free.max()

    def round(self, *, backwards: bool) -> Iterator[Wave]:
        """Run the next forwards and, if they may run, backwards that are ready."""
        f, b = self._begun[Kind.FORWARD], self._begun[Kind.BACKWARD]
        forward = f < np.minimum(self._number, self._warm_up + b + 1)
        ran = list(self._run_ready(Kind.FORWARD, np.flatnonzero(forward)))
        if backwards:
            backward = ~forward & (b < self._number)
            ran += self._run_ready(Kind.BACKWARD, np.flatnonzero(backward))
        if not ran:
            raise RuntimeError("a schedule must end: its workers wait for one another.")
        yield from ran

    def weights_left(self) -> Iterator[Wave]:
        """Compute the gradients of the weights that are left at the end."""
        for late in range(int(self._late.max()), 0, -1) if self._split else ():
            workers = np.flatnonzero(np.minimum(self._late, self._number) >= late)
            yield from self._run_weights(workers, np.full(len(workers), self._number - late))

    def _run_ready(self, kind: Kind, workers: Indices) -> Iterator[Wave]:
        """Run the next action of a kind of each of these workers that it has arrived at."""
        begun = self._begun[kind]
        i, j = self._visits[kind][workers, begun[workers]].T
        place = j if kind is Kind.FORWARD else self._last - j
        ready = ~np.isnan(self._arrival[i, place])
        workers, i, j, place = workers[ready], i[ready], j[ready], place[ready]
        if not len(workers):
            return
        if kind is Kind.BACKWARD and (dropped := self._costs.recomputes(i, j)).any():
            yield self._run(Kind.RECOMPUTE, workers[dropped], i[dropped], j[dropped])
        wave = self._run(kind, workers, i, j, self._arrival[i, place])
        self._arrival[i, place + 1] = wave.end
        yield wave
        if kind is Kind.BACKWARD and self._split:
            yield from self._run_weights(workers, (begun - self._late)[workers])
        begun[workers] += 1

    def _run_weights(self, workers: Indices, places: Indices) -> Iterator[Wave]:
        """Compute the gradients of the weights for the backwards at these places of the rows."""
        due = places >= 0
        if due.any():
            i, j = self._visits[Kind.BACKWARD][workers[due], places[due]].T
            yield self._run(Kind.WEIGHTS, workers[due], i, j)

    def _run(
        self, kind: Kind, workers: Indices, i: Indices, j: Indices, arrival: Times | float = 0.0
    ) -> Wave:
        start = np.maximum(self._free[workers], arrival)
        if self._weights is not None:
            start = self._weights.awaited(workers, j, start, self._free[workers])
        self._free[workers] = end = start + self._costs.times(kind, i, j)
        return Wave(kind, i, j, start, end)


class _Weights:
    """The weights that come from the host: of the stage at work, and meanwhile of the next one.

    A stage to which a worker comes back from one other is still there.
    """

    def __init__(self, workers: int, loads: Times) -> None:
        self._loads = loads
        self._turns = np.full((2, workers), -1)  # the stage at work, and the one before it
        self._asked = np.zeros(workers)  # when the turn at work began, and next weights were
        self._there = np.zeros(workers)  # when the latest weights are

    def awaited(self, workers: Indices, j: Indices, start: Times, free: Times) -> Times:
        """Return the starts of actions, by which the weights of their stages are there.

        Those of the next stage begin to come when a worker is free for the first action of a turn.
        """
        now, before = self._turns[:, workers]
        turn = now != j
        load = turn & (before != j)
        there = np.maximum(self._asked, self._there)[workers] + self._loads[j]
        self._there[workers[load]] = there[load]
        start = np.where(load, np.maximum(start, there), start)
        workers = workers[turn]
        self._turns[1, workers] = self._turns[0, workers]
        self._turns[0, workers] = j[turn]
        self._asked[workers] = free[turn]
        return start


def _visits(rows: Sequence[Sequence[Visit]]) -> Indices:
    """The visits of each worker, of shape (workers, visits, 2)."""
    numbers = chain.from_iterable(chain.from_iterable(rows))
    return np.fromiter(numbers, dtype=np.int64).reshape(len(rows), -1, 2)


def end_and_peaks(
    waves: Iterable[Wave], costs: ActionCosts, placement: Sequence[int]
) -> tuple[float, Bytes]:
    """Return the end of a mini-batch, and the bytes of each stage at the peak of its device.

    With weights on the host it ends when the gradients are there.
    """
    worker_of = np.array(placement)
    now, at_peak = np.zeros((len(placement), 2)), np.zeros((len(placement), 2))
    total, peak = np.zeros(worker_of.max() + 1), np.zeros(worker_of.max() + 1)
    end = np.zeros(len(placement))  # of each stage's latest action
    for wave in waves:
        change, workers = costs.changes(wave.kind, wave.i, wave.j), worker_of[wave.j]
        end[wave.j] = wave.end
        now[wave.j] += change
        total[workers] += change[:, 0] + change[:, 1]  # faster than a sum over so short an axis
        risen = total > peak
        if risen.any():
            peak[risen] = total[risen]
            at_peak[risen[worker_of]] = now[risen[worker_of]]
    last = float(end.max())
    if costs.transfers is not None:
        home = np.zeros_like(total)
        for j in end.argsort():
            home[worker_of[j]] = max(home[worker_of[j]], end[j]) + costs.transfers[j, 1]
        last = float(home.max())
    return last, at_peak
