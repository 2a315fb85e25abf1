"""Simulates a schedule: whether it ends, its bubble, and how many activations are alive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lightning_gpipe.core.plan.action import Action, Kind, Row

_MAKES = (Kind.FORWARD, Kind.RECOMPUTE)  # which make activations
_FREES = (Kind.BACKWARD, Kind.WEIGHTS)  # which free them; the second, where there are both


@dataclass(frozen=True)
class Simulation:
    """The result of simulating a schedule.

    Attributes:
        start: When each action starts, in units of cost; those of one worker in their order.
        end: When each ends.
        makespan: When the last one ends.
        bubble: The share of the workers' time in which they are idle.
        peak_live: For each worker, the most micro-batches whose activations it holds at once.
    """

    start: dict[Action, float]
    end: dict[Action, float]
    makespan: float
    bubble: float
    peak_live: tuple[int, ...]


def one(action: Action) -> float:
    """The cost of an action where all on stages cost the same, and the caller's nothing."""
    return 0.0 if action.by_caller else 1.0


def simulate(
    rows: Sequence[Row],
    needs: Callable[[Action], Iterable[Action]],
    cost: Callable[[Action], float] = one,
    caller: Row = (),
) -> Simulation:
    """Simulate the rows: each worker runs its actions in order, each after those that it needs.

    Args:
        rows: The actions of each worker, in order.
        needs: The actions that must have ended before an action starts; those in no row are
            ignored.
        cost: How long an action takes, in any unit.
        caller: The caller's actions, in order; it is no worker that could be idle.

    Raises:
        RuntimeError: If the workers deadlock; names the actions that they wait at.
    """
    start: dict[Action, float] = {}
    end: dict[Action, float] = {}
    everyone = [*rows, caller]
    clock = [0.0] * len(everyone)
    waiting = [list(reversed(row)) for row in everyone]
    present = {action for row in everyone for action in row}

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
        stuck = [_stuck(w, queue[-1], len(rows)) for w, queue in enumerate(waiting) if queue]
        raise RuntimeError(f"the schedule must end, but its workers deadlock: {', '.join(stuck)}")

    makespan = max(clock, default=0.0)
    busy = sum(end[action] - start[action] for row in rows for action in row)
    bubble = 1.0 - busy / (makespan * len(rows)) if makespan else 0.0
    return Simulation(start, end, makespan, bubble, tuple(map(_peak_live, rows)))


def _stuck(worker: int, action: Action, workers: int) -> str:
    if worker == workers:
        return f"the caller at {action}"
    return f"worker {worker} at {action} on stage {action.j}"


def _peak_live(row: Row) -> int:
    """The most micro-batches of one worker whose activations are alive at once.

    A forward makes them, unless it drops them and a recomputation makes them again. They are alive
    until the last action that needs them: the backward or, where that is split, its second part.
    """
    makes = {(action.i, action.j): action for action in row if action.kind in _MAKES}
    frees = {(action.i, action.j): action for action in row if action.kind in _FREES}
    live = peak = 0
    for action in row:
        key = action.i, action.j
        live += makes.get(key) is action
        peak = max(peak, live)
        live -= frees.get(key) is action
    return peak
