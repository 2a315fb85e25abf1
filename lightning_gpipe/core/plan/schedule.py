"""Which action each worker runs, in what order.

A pipeline is usually a tangle of loops in which order, transfer and computation cannot be told
apart, so nobody can print what will run or prove that it ends. Here the order is a value: a
:class:`Schedule` has one row of actions for each worker, it prints as a table, and the object that
is printed, simulated and tested is the one that runs.

An action is forward (F), recompute (R) or backward (B) of micro-batch i on stage j. Transfers are
not actions: what an action needs follows from the action alone, so a table stays short enough to
check by eye::

    stage 0 | F0 F1 F2 .  .  B2 B1 B0
    stage 1 | .  F0 F1 F2 B2 B1 B0 .

The mini-batch's loss sits between the halves: no backward starts before the last forward ended,
because the user's code computes the loss on the whole mini-batch.

Throughout, i is one of m micro-batches and j one of n stages; a worker runs one device's stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache
from itertools import groupby
from typing import NamedTuple


class Kind(Enum):
    """What an action does with its micro-batch."""

    FORWARD = "F"
    RECOMPUTE = "R"
    BACKWARD = "B"

    __hash__ = object.__hash__  # as fast as can be: actions are keys on the hot path


class Action(NamedTuple):
    """One unit of work: ``kind`` of micro-batch ``i`` on stage ``j``."""

    kind: Kind
    i: int
    j: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.i}"


Row = tuple[Action, ...]


@lru_cache(maxsize=2**16)
def successor(action: Action) -> Action:
    """The action that needs what a forward or backward makes, on the stage beside.

    Past the last stage and before the first it stands for the caller.
    """
    step = 1 if action.kind is Kind.FORWARD else -1
    return Action(action.kind, action.i, action.j + step)


@dataclass(frozen=True)
class Schedule:
    """For each worker, the ordered actions of one mini-batch; stage j belongs to worker j mod d.

    Attributes:
        m: The number of micro-batches.
        n: The number of stages.
        rows: One row of actions per worker.
    """

    m: int
    n: int
    rows: tuple[Row, ...]

    def worker_of(self, action: Action) -> int:
        """The worker that runs ``action``."""
        return action.j % len(self.rows)

    @cached_property
    def simulation(self) -> Simulation:
        """The schedule played with actions of equal cost."""
        return simulate(self)

    @property
    def bubble(self) -> float:
        """The share of time in which a worker is idle, were all actions equally long."""
        return self.simulation.bubble

    @cached_property
    def forward_half(self) -> Schedule:
        """The actions before the loss."""
        return self._only(lambda action: action.kind is Kind.FORWARD)

    @cached_property
    def backward_half(self) -> Schedule:
        """The actions after the loss."""
        return self._only(lambda action: action.kind is not Kind.FORWARD)

    @cached_property
    def interleaved(self) -> Row:
        """All actions in one sequence that a single thread can run, clock cycle by clock cycle."""
        start = self.simulation.start
        return tuple(sorted(start, key=lambda action: (start[action], self.worker_of(action))))

    @cached_property
    def turns(self) -> tuple[tuple[int, Row], ...]:
        """The same sequence as the workers take turns in it: a worker, and what it runs."""
        groups = groupby(self.interleaved, self.worker_of)
        return tuple((worker, tuple(row)) for worker, row in groups)

    def _only(self, wanted: Callable[[Action], bool]) -> Schedule:
        return Schedule(self.m, self.n, tuple(tuple(filter(wanted, row)) for row in self.rows))

    def __str__(self) -> str:
        return table(self)


@lru_cache(maxsize=256)
def fill_drain(m: int, n: int, *, workers: int | None = None, recomputed: int = 0) -> Schedule:
    """GPipe's order: all forwards, then all backwards reversed.

    Micro-batch i meets stage j at clock k = i + j while the pipeline fills. With fewer workers than
    stages (``n`` a multiple of ``workers``) the order is looped: a worker takes all micro-batches
    through its first stage, then through its next, so that a device with v stages waits no longer
    than a device with one::

        stage 0 (worker 0) | F0 F1 .  .  .
        stage 1 (worker 1) | .  F0 F1 .  .
        stage 2 (worker 0) | .  .  F0 F1 .
        stage 3 (worker 1) | .  .  .  F0 F1

    Args:
        m: The number of micro-batches.
        n: The number of stages.
        workers: The number of workers, one per stage by default.
        recomputed: The first so many micro-batches drop their activations; each of their backwards
            is preceded by a recompute, which needs no gradient and so fills the wait for one.

    Source: Huang et al., "GPipe" (2019), for fill-drain; Lamy-Poirier, "Breadth-First Pipeline
    Parallelism" (2022), for the looped form.
    """
    workers = n if workers is None else workers

    def forward(stages: range) -> Iterator[Action]:
        for j in stages:
            for i in range(m):
                yield Action(Kind.FORWARD, i, j)

    def backward(stages: range) -> Iterator[Action]:
        for j in reversed(stages):
            for i in reversed(range(m)):
                if i < recomputed:
                    yield Action(Kind.RECOMPUTE, i, j)
                yield Action(Kind.BACKWARD, i, j)

    own = [range(worker, n, workers) for worker in range(workers)]
    return Schedule(m, n, tuple((*forward(stages), *backward(stages)) for stages in own))


@dataclass(frozen=True)
class Simulation:
    """What became of a schedule when it was played.

    Attributes:
        start: When each action starts, in units of cost.
        makespan: When the last one ends.
        bubble: The share of the workers' time in which they are idle.
        peak_live: For each worker, the most micro-batches whose activations it holds at once.
    """

    start: dict[Action, float]
    makespan: float
    bubble: float
    peak_live: tuple[int, ...]


def simulate(
    schedule: Schedule, cost: Callable[[Action], float] = lambda action: 1.0
) -> Simulation:
    """Play ``schedule``, each worker in its own order and no action before what it needs.

    Args:
        schedule: What to play.
        cost: How long an action takes, in any unit.

    Raises:
        RuntimeError: If the workers wait for one another for ever; names the actions they wait at.
    """
    start: dict[Action, float] = {}
    end: dict[Action, float] = {}
    clock = [0.0] * len(schedule.rows)
    waiting = [list(reversed(row)) for row in schedule.rows]
    present = {action for row in schedule.rows for action in row}

    progress = True
    while progress:
        progress = False
        for worker, queue in enumerate(waiting):
            while queue:
                needed = [a for a in needs(queue[-1], schedule.m, schedule.n) if a in present]
                if not all(a in end for a in needed):
                    break
                action = queue.pop()
                start[action] = max([clock[worker], *(end[a] for a in needed)])
                clock[worker] = end[action] = start[action] + cost(action)
                progress = True
    if any(waiting):
        stuck = [
            f"worker {w} at {queue[-1]} on stage {queue[-1].j}"
            for w, queue in enumerate(waiting)
            if queue
        ]
        raise RuntimeError(f"the schedule must end, but its workers deadlock: {', '.join(stuck)}")

    makespan = max(clock, default=0.0)
    busy = sum(end[action] - start[action] for action in end)
    bubble = 1.0 - busy / (makespan * len(clock)) if makespan else 0.0
    return Simulation(start, makespan, bubble, tuple(map(_peak_live, schedule.rows)))


def needs(action: Action, m: int, n: int) -> Iterator[Action]:
    """Yield the actions that must have ended before ``action`` starts."""
    i, j = action.i, action.j
    if action.kind is Kind.FORWARD:
        if j > 0:
            yield Action(Kind.FORWARD, i, j - 1)
        return
    yield Action(Kind.FORWARD, i, j)
    for other in range(m):  # the loss is computed on the whole mini-batch
        yield Action(Kind.FORWARD, other, n - 1)
    if action.kind is Kind.BACKWARD and j < n - 1:
        yield Action(Kind.BACKWARD, i, j + 1)


def table(schedule: Schedule) -> str:
    """Draw the schedule with one line per stage and one column per clock cycle."""
    start = schedule.simulation.start
    looped = schedule.n != len(schedule.rows)
    width = max((len(str(action)) for action in start), default=1)
    lines = []
    for j in range(schedule.n):
        cells = ["."] * round(schedule.simulation.makespan)
        for action in start:
            if action.j == j:
                cells[round(start[action])] = str(action)
        owner = f" (worker {j % len(schedule.rows)})" if looped else ""
        row = " ".join(cell.ljust(width) for cell in cells)
        lines.append(f"stage {j}{owner} | {row}".rstrip())
    return "\n".join(lines) + "\n"


def _peak_live(row: Row) -> int:
    recomputed = {(a.i, a.j) for a in row if a.kind is Kind.RECOMPUTE}
    live = peak = 0
    for action in row:
        if action.kind is Kind.BACKWARD:
            live -= 1
        elif action.kind is Kind.RECOMPUTE or (action.i, action.j) not in recomputed:
            live += 1
            peak = max(peak, live)
    return peak
