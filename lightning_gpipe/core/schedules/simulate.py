"""Simulates a schedule: finds deadlocks and the bubble."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lightning_gpipe.core.schedules.action import Action, Row


@dataclass(frozen=True)
class Simulation:
    """The result of simulating a schedule.

    Attributes:
        start: The start of each action, in units of cost; those of one worker in their order.
        end: The end of each action.
        makespan: The end of the last action.
        bubble: The share of the workers' time in which they are idle.
    """

    start: dict[Action, float]
    end: dict[Action, float]
    makespan: float
    bubble: float


def one(action: Action) -> float:
    """Return the cost 1 for an action on a stage, and 0 for one of the caller."""
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
        needs: Returns the actions that must have ended before an action starts; those in no row
            are ignored.
        cost: Returns the duration of an action, in any unit.
        caller: The caller's actions, in order; its idle time does not count.
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
                start[action] = max([clock[worker], *(end[need] for need in needed)])
                clock[worker] = end[action] = start[action] + cost(action)
                progress = True
    if any(waiting):
        stuck = [_stuck(w, queue[-1], len(rows)) for w, queue in enumerate(waiting) if queue]
        raise RuntimeError(f"the schedule must end, but its workers deadlock: {', '.join(stuck)}")

    makespan = max(clock, default=0.0)
    busy = sum(end[action] - start[action] for row in rows for action in row)
    bubble = 1.0 - busy / (makespan * len(rows)) if makespan else 0.0
    return Simulation(start, end, makespan, bubble)


def _stuck(worker: int, action: Action, workers: int) -> str:
    if worker == workers:
        return f"the caller at {action}"
    return f"worker {worker} at {action} on stage {action.j}"
