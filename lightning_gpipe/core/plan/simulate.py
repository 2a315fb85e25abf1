"""Simulates a schedule: whether it ends, its bubble, and how many activations are alive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lightning_gpipe.core.plan.action import Action, Kind, Row


@dataclass(frozen=True)
class Simulation:
    """The result of simulating a schedule.

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


def one(action: Action) -> float:
    """The cost of an action where all cost the same."""
    return 1.0


def simulate(
    rows: Sequence[Row],
    needs: Callable[[Action], Iterable[Action]],
    cost: Callable[[Action], float] = one,
) -> Simulation:
    """Simulate the rows: each worker runs its actions in order, each after those that it needs.

    Args:
        rows: The actions of each worker, in order.
        needs: The actions that must have ended before an action starts; those in no row are
            ignored.
        cost: How long an action takes, in any unit.

    Raises:
        RuntimeError: If the workers deadlock; names the actions that they wait at.
    """
    start: dict[Action, float] = {}
    end: dict[Action, float] = {}
    clock = [0.0] * len(rows)
    waiting = [list(reversed(row)) for row in rows]
    present = {action for row in rows for action in row}

    progress = True
    while progress:
        progress = False
        for worker, queue in enumerate(waiting):
            while queue:
                needed = [action for action in needs(queue[-1]) if action in present]
                if not all(action in end for action in needed):
                    break
                action = queue.pop()
                start[action] = max([clock[worker], *(end[each] for each in needed)])
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
    return Simulation(start, makespan, bubble, tuple(map(_peak_live, rows)))


def _peak_live(row: Row) -> int:
    """The most micro-batches of one worker whose activations are alive at once.

    A forward makes them, unless it drops them and a recomputation makes them again.
    """
    recomputed = {(a.i, a.j) for a in row if a.kind is Kind.RECOMPUTE}
    live = peak = 0
    for action in row:
        if action.kind is Kind.BACKWARD:
            live -= 1
        elif action.kind is Kind.RECOMPUTE or (action.i, action.j) not in recomputed:
            live += 1
            peak = max(peak, live)
    return peak
