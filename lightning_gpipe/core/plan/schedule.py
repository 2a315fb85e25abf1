"""The actions that each worker runs, in order.

A pipeline is usually written as loops that mix order, transfers and computation, so its order can
be neither printed nor proved free of deadlock. Here the order is a value: a :class:`Schedule` has
one row of actions for each worker, it prints as a table, and the object that is printed, simulated
and tested is the one that runs.

An action is forward (F), recompute (R) or backward (B) of micro-batch i on stage j. Transfers are
not actions: what an action needs follows from the action alone, so a table stays short enough to
check by eye::

    stage 0 | F0 F1 F2 .  .  B2 B1 B0
    stage 1 | .  F0 F1 F2 B2 B1 B0 .

A schedule has phases, between which the caller's code runs. GPipe's has two: the user's code
computes the loss on the whole mini-batch, so no backward starts before the last forward has ended.
Where each micro-batch has a loss of its own, forwards and backwards may alternate in one phase.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import chain, groupby

from lightning_gpipe.core.plan.action import Action, Kind, Row
from lightning_gpipe.core.plan.draw import table
from lightning_gpipe.core.plan.simulate import Simulation, one, simulate


class Loss(Enum):
    """What the loss is computed on, and so what the backwards of the last stage wait for."""

    OF_MINI_BATCH = "mini-batch"
    OF_MICRO_BATCH = "micro-batch"


@dataclass(frozen=True)
class Schedule:
    """For each worker, the ordered actions of one mini-batch.

    Attributes:
        m: The number of micro-batches.
        placement: The worker of each stage.
        phases: For each phase, one row of actions per worker. A phase starts when the caller has
            all results of the previous phase.
        loss: What the loss is computed on.
    """

    m: int
    placement: tuple[int, ...]
    phases: tuple[tuple[Row, ...], ...]
    loss: Loss = Loss.OF_MINI_BATCH

    @property
    def n(self) -> int:
        """The number of stages."""
        return len(self.placement)

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """All actions of each worker, in order."""
        return tuple(tuple(chain(*parts)) for parts in zip(*self.phases, strict=True))

    def phase(self, k: int) -> Schedule:
        """One phase as a schedule of its own."""
        return self._phases[k]

    def phase_of(self, action: Action) -> int:
        """The index of the phase in which ``action`` runs."""
        return self._phase_of[action]

    def recomputed(self, j: int) -> frozenset[int]:
        """The micro-batches that stage ``j`` recomputes."""
        return self._recomputed[j]

    def needs(self, action: Action) -> Iterator[Action]:
        """Yield the actions that must have ended before ``action`` starts.

        They are the earlier kinds on its own stage; its own kind on the neighbouring stage or, for
        the first backward, the forwards that the loss needs; and the results of the previous phase.
        Some may be in no row.
        """
        kind, i, j = action
        for other in Kind:
            if other.letter in kind.after:
                yield Action(other, i, j)
        if kind.direction and 0 <= j - kind.direction < self.n:
            yield Action(kind, i, j - kind.direction)
        elif kind is Kind.BACKWARD:
            whole = self.loss is Loss.OF_MINI_BATCH
            for other_i in range(self.m) if whole else [i]:
                yield Action(Kind.FORWARD, other_i, self.n - 1)
        yield from self._results_before.get(action, ())

    def simulate(self, cost: Callable[[Action], float] = one) -> Simulation:
        """Simulate the schedule; see :func:`~lightning_gpipe.core.plan.simulate.simulate`."""
        return simulate(self.rows, self.needs, cost)

    @cached_property
    def simulation(self) -> Simulation:
        """The simulation with actions of equal cost."""
        return self.simulate()

    @property
    def bubble(self) -> float:
        """The share of time in which a worker is idle, if all actions take equally long."""
        return self.simulation.bubble

    @cached_property
    def interleaved(self) -> Row:
        """All actions in one sequence that a single thread can run, clock cycle by clock cycle."""
        start = self.simulation.start
        return tuple(sorted(start, key=lambda action: (start[action], self.placement[action.j])))

    @cached_property
    def turns(self) -> tuple[tuple[int, Row], ...]:
        """The same sequence, grouped by worker: for each turn, the worker and its actions."""
        groups = groupby(self.interleaved, lambda action: self.placement[action.j])
        return tuple((worker, tuple(row)) for worker, row in groups)

    def __str__(self) -> str:
        return table(self.simulation.start, self.simulation.makespan, self.placement)

    @cached_property
    def _phases(self) -> tuple[Schedule, ...]:
        return tuple(replace(self, phases=(rows,)) for rows in self.phases)

    @cached_property
    def _recomputed(self) -> list[frozenset[int]]:
        again = [action for row in self.rows for action in row if action.kind is Kind.RECOMPUTE]
        return [frozenset(a.i for a in again if a.j == j) for j in range(self.n)]

    @cached_property
    def _phase_of(self) -> dict[Action, int]:
        phases = enumerate(self.phases)
        return {action: k for k, rows in phases for row in rows for action in row}

    @cached_property
    def _results_before(self) -> dict[Action, tuple[Action, ...]]:
        """For each action, the actions of the previous phase whose results the caller needs."""
        found: dict[Action, tuple[Action, ...]] = {}
        results: tuple[Action, ...] = ()
        for rows in self.phases:
            actions = tuple(chain(*rows))
            found |= dict.fromkeys(actions, results)
            results = tuple(filter(self._is_for_the_caller, actions))
        return found

    def _is_for_the_caller(self, action: Action) -> bool:
        return not 0 <= action.j + action.kind.direction < self.n
