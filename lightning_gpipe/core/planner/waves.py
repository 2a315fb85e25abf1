"""Simulates a mini-batch in numpy: the start and end of each action.

In a round, every worker whose next forward or backward is ready runs it: these are a *wave*. So a
thousand micro-batches on a thousand stages take some thousand rounds instead of a million actions.
A recomputation and the gradients of the weights follow the forward or backward before them. Waves
depend on the schedule alone, so they are found once for all costs. The tests compare the times with
the simulation of the schedule.

Workers wait in further actions that take no time: if the mini-batch has one loss, they meet after
the last forward. If the weights are on the host, a worker waits for those of a stage at the
beginning of a *turn*, when it goes on to another stage. Those of the next turn come meanwhile, one
stage after another; a stage to which a worker comes back from one other is still there.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lightning_gpipe.core.planner.action_costs import ActionCosts, Times
from lightning_gpipe.core.planner.row_actions import (
    BACKWARD,
    FORWARD,
    RECOMPUTE,
    ROW_KINDS,
    WEIGHTS,
    Indices,
    Numbers,
    RowActions,
    order_needs,
    row_actions,
)
from lightning_gpipe.core.schedules import ScheduleKind

_MEETING, _TURN, _LOAD = range(len(ROW_KINDS), len(ROW_KINDS) + 3)  # kinds that are no actions
_START, _MET, _FIRST = range(3)  # nodes that all rows share, and the first of a row


class Waves:
    """The waves of a schedule, and the times of its actions by their costs.

    A *node* is a forward, a backward, a wait or a load of weights. It starts when the node before
    it in its row has ended, with the actions that follow that, and the node that it waits for.
    ``one_loss``: no backward starts before the last forward has ended.
    """

    def __init__(self, actions: RowActions, *, one_loss: bool, from_host: bool) -> None:
        self._actions = rows = actions
        rows = _with_meeting(rows) if one_loss else rows
        self._rows = rows = _with_loads(rows) if from_host else rows
        self._is_action = rows.kinds < _MEETING
        is_node = (rows.kinds != RECOMPUTE) & (rows.kinds != WEIGHTS)
        self._places = np.flatnonzero(is_node)
        self._node_of = np.cumsum(is_node) - 1  # the node that each action is or follows
        self._followers = _by_number(np.arange(len(is_node)) - self._places[self._node_of])
        self._last_followers = np.append(self._places[1:], len(is_node)) - 1
        # Nodes have numbers: those of a row in its order, and then its stop, which never ends.
        worker = rows.worker_of_each[self._places]
        self._numbers = _FIRST + np.arange(len(worker)) + worker
        counts = np.bincount(worker, minlength=rows.workers)
        stops = _FIRST + np.cumsum(counts + 1) - 1
        wait = self._waits(stops)
        before = np.arange(-1, len(wait) - 1)
        before[stops - counts] = _START
        self._met = before[np.flatnonzero(wait == _MET)]
        waves = list(self._found(wait, stops - counts, stops))
        # The nodes in the order of waves, and the places of others in this order.
        self._bounds = [0, *np.cumsum(list(map(len, waves))).tolist()]
        self._order = np.concatenate(waves)
        self._place_of = np.arange(len(wait))
        self._place_of[self._order] = _FIRST + np.arange(len(self._order))
        self._before = before[self._order]
        self._places_before = self._place_of[self._before]
        self._places_waited = self._place_of[wait[self._order]]

    def timing(self, costs: ActionCosts) -> tuple[Times, Times]:
        durations, behind = self._durations(costs)
        end, gaps = self._ends(durations, behind)
        starts = np.maximum(end[self._places_before] + gaps, end[self._places_waited])
        places = self._place_of[self._numbers]
        ends = end[places][self._node_of] + behind
        begins = np.concatenate([[0.0], ends[:-1]])
        begins[self._places] = starts[places - _FIRST]
        return begins[self._is_action], ends[self._is_action]

    def makespan(self, costs: ActionCosts) -> float:
        """Return the time of the mini-batch, until gradients for the host have arrived there."""
        if costs.transfers is None:
            durations, behind = self._durations(costs)
            end, _ = self._ends(durations, behind)
            return float((end[self._place_of[self._numbers]] + behind[self._last_followers]).max())
        ends, worker_of = np.zeros(costs.stages), np.zeros(costs.stages, dtype=np.int64)
        _, ends[self._actions.j] = self.timing(costs)  # of each stage's latest action
        worker_of[self._actions.j] = self._actions.worker_of_each
        home = np.zeros(self._actions.workers)
        for j in ends.argsort():
            home[worker_of[j]] = max(home[worker_of[j]], ends[j]) + costs.transfers[j, 1]
        return float(home.max())

    def _durations(self, costs: ActionCosts) -> tuple[Times, Times]:
        """Return the time of each action, and the time from a node to the end of each follower."""
        durations = np.zeros(len(self._node_of))
        durations[self._is_action] = costs.times(self._actions)
        if costs.transfers is not None:
            loads = self._rows.kinds == _LOAD
            durations[loads] = costs.transfers[self._rows.j[loads], 0]
        behind = durations.copy()
        behind[self._places] = 0.0
        for places in self._followers[2:]:  # a first follower takes its own time
            behind[places] += behind[places - 1]
        return durations, behind

    def _ends(self, durations: Times, behind: Times) -> tuple[Times, Times]:
        """Return when each node ends, and how long it is after the end of the node before it."""
        times, after = np.zeros((2, len(self._place_of)))
        times[self._numbers] = durations[self._places]
        after[self._numbers] = behind[self._last_followers]
        times, gaps = times[self._order], after[self._before]
        end = np.zeros(_FIRST + len(times))
        row, other = np.empty((2, int(np.diff(self._bounds).max())))
        for first, last in pairwise(self._bounds):
            if first == self._meeting:
                end[_MET] = (end[self._place_of[self._met]] + after[self._met]).max()
            start, waited = row[: last - first], other[: last - first]
            end.take(self._places_before[first:last], out=start, mode="clip")
            end.take(self._places_waited[first:last], out=waited, mode="clip")
            start += gaps[first:last]
            np.maximum(start, waited, out=start)
            np.add(start, times[first:last], out=end[_FIRST + first : _FIRST + last])
        return end, gaps

    def _waits(self, stops: Indices) -> Indices:
        """Return the node for which each node waits; a stop waits for itself."""
        kinds, i, j = (each[self._places] for each in self._rows[:3])
        wait = np.arange(stops[-1] + 1)
        moving = kinds <= BACKWARD
        stages, numbers = 1 + self._actions.j.max(), self._numbers[moving]
        # A micro-batch goes through the stages and back.
        way = np.where(kinds == FORWARD, j, 2 * stages - 1 - j)[moving]
        nodes = np.full((1 + self._actions.i.max(), 2 * stages + 1), stops[-1])
        nodes[:, 0] = _START
        nodes[i[moving], way + 1] = numbers
        wait[numbers] = nodes[i[moving], way]
        wait[self._numbers[kinds == _MEETING]] = _MET
        turns = np.flatnonzero(kinds == _TURN)
        worker = self._rows.worker_of_each[self._places[turns]]
        needs_load = _needs_load(worker, j[turns])
        turns, loads = self._numbers[turns], self._numbers[kinds == _LOAD]
        wait[turns[needs_load]], wait[turns[~needs_load]] = loads, _START
        # The weights of a turn begin to come when the one before it begins.
        before = np.where(_shifted(worker, 1) == worker, _shifted(turns, 1), _START)
        wait[loads] = before[needs_load]
        return wait

    def _found(self, wait: Indices, firsts: Indices, stops: Indices) -> Iterator[Indices]:
        done = np.zeros(len(wait), dtype=np.bool_)
        done[_START] = True
        self._meeting, number, heads = -1, 0, firsts.copy()
        while True:
            ready = done.take(wait.take(heads))
            wave = heads.compress(ready)
            if len(wave):
                done[wave] = True
                heads += ready
                number += len(wave)
                yield wave
            elif len(self._met) and not done[_MET]:
                self._meeting, done[_MET] = number, True
            else:
                break
        if not np.array_equal(heads, stops):
            raise RuntimeError("a schedule must end: its workers wait for one another.")


def waves_of(
    order: ScheduleKind,
    m: int,
    placement: tuple[int, ...],
    recomputed: tuple[int, ...],
    *,
    from_host: bool = False,
) -> Waves:
    """Return the waves of a schedule; other arguments are as for :func:`row_actions`."""
    return _waves_of(order, m, placement, order_needs(order, recomputed), from_host)


@lru_cache(maxsize=1)  # as for the actions
def _waves_of(
    order: ScheduleKind,
    m: int,
    placement: tuple[int, ...],
    recomputed: tuple[int, ...],
    from_host: bool,
) -> Waves:
    actions = row_actions(order, m, placement, recomputed)
    return Waves(actions, one_loss=not order.by_micro_batch, from_host=from_host)


def _with_meeting(rows: RowActions) -> RowActions:
    forwards = np.bincount(rows.worker_of_each, rows.kinds == FORWARD).astype(np.int64)
    at = rows.begins[:-1] + forwards
    return _with_waits(rows, at, _MEETING, rows.j[at - 1])


def _with_loads(rows: RowActions) -> RowActions:
    """Let each worker wait for weights, which come in rows after those of all workers."""
    begins = np.append(True, rows.j[1:] != rows.j[:-1])
    begins[rows.begins[:-1]] = True
    at = np.flatnonzero(begins)
    j, worker = rows.j[at], rows.worker_of_each[at]
    rows, needs_load = _with_waits(rows, at, _TURN, j), _needs_load(worker, j)
    loads = j[needs_load]
    numbers = np.bincount(worker[needs_load], minlength=rows.workers)
    return RowActions(
        np.append(rows.kinds, np.full_like(loads, _LOAD)),
        np.append(rows.i, np.zeros_like(loads)),
        np.append(rows.j, loads),
        np.append(rows.begins, rows.begins[-1] + np.cumsum(numbers)),
    )


def _with_waits(rows: RowActions, at: Indices, kind: int, j: Numbers) -> RowActions:
    """Insert waits of a kind before these actions; ``j`` are the stages that workers are at."""
    return RowActions(
        np.insert(rows.kinds, at, kind),
        np.insert(rows.i, at, 0),
        np.insert(rows.j, at, j),
        rows.begins + np.searchsorted(at, rows.begins),
    )


def _needs_load(worker: Indices, j: Numbers) -> NDArray[np.bool_]:
    """Return for each turn whether its stage is another than in the turn before the last."""
    needs: NDArray[np.bool_] = (_shifted(worker, 2) != worker) | (_shifted(j, 2) != j)
    return needs


def _shifted(numbers: NDArray[np.integer], by: int) -> NDArray[np.integer]:
    """Return the number ``by`` places before each, or -1."""
    return np.append(np.full(by, -1), numbers)[: len(numbers)]


def _by_number(numbers: Indices) -> list[Indices]:
    counts = np.bincount(numbers)
    return np.split(np.argsort(numbers, kind="stable"), np.cumsum(counts)[:-1])
