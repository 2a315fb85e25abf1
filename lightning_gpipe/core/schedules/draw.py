"""Draws a schedule as text: one line per stage, one column per clock cycle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_gpipe.core.schedules.action import Action, Row


def table(
    start: Mapping[Action, float], makespan: float, placement: Sequence[int], caller: Row = ()
) -> str:
    """Return the table of a schedule::

        stage 0 (worker 0) | F0 F1 .  .  .
        stage 1 (worker 1) | .  F0 F1 .  .
        stage 2 (worker 0) | .  .  F0 F1 .

    Args:
        start: The clock cycle in which each action starts.
        makespan: The number of clock cycles.
        placement: The worker of each stage; shown if a worker has several stages.
        caller: The caller's actions, in order, listed below the stages: they take no clock cycle.
    """
    width = max((len(str(action)) for action in start), default=1)
    several = len(set(placement)) < len(placement)
    lines = []
    for j, worker in enumerate(placement):
        cells = ["."] * round(makespan)
        for action, cycle in start.items():
            if action.j == j:
                cells[round(cycle)] = str(action)
        owner = f" (worker {worker})" if several else ""
        row = " ".join(cell.ljust(width) for cell in cells)
        lines.append(f"stage {j}{owner} | {row}".rstrip())
    if caller:
        title = "caller".ljust(lines[-1].index(" |"))
        lines.append(f"{title} | {' '.join(map(str, caller))}")
    return "\n".join(lines) + "\n"
