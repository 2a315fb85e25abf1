"""What the caller does while a schedule runs in which each micro-batch has a loss of its own.

The user's code for a micro-batch runs up to its call of the pipeline (P), which the first stage
waits for, and from the output to the loss (L), which the last stage waits for. At the end backward
goes on through what came before the call (B), for which nobody waits.

The caller is one thread, so all of that needs an order, and a wait for a result must not keep back
another one that a worker waits for already. When results come depends on what actions take, which
nobody knows before. But some things are certain: what an action needs, directly or not, has ended
when it starts. So P comes as soon as all losses are computed that its forward needs, and before any
other loss; and B when a loss has come that needs the backward of the first stage. If the caller
takes no time itself, then no worker waits for it, whatever the actions take.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lightning_gpipe.core.plan.action import Action, Kind
from lightning_gpipe.core.plan.route import CALLER
from lightning_gpipe.core.plan.schedule import Schedule


def with_caller(schedule: Schedule) -> Schedule:
    """The schedule with the caller's row.

    Args:
        schedule: One of a single phase, without the caller's row.
    """
    m, n = schedule.m, schedule.n
    outputs = _in_order(schedule, Kind.FORWARD, n - 1)
    gradients = _in_order(schedule, Kind.BACKWARD, 0)
    losses_before = _needed(schedule, Kind.BACKWARD, n - 1, outputs)
    ended_before = _needed(schedule, Kind.BACKWARD, 0, gradients)
    seen = [ended_before[Action(Kind.FORWARD, i, n - 1)] for i in outputs]

    def ordered() -> Iterator[tuple[int, int, Action]]:
        """The actions, each with its place: by the losses before it, then by what it is."""
        for i in _in_order(schedule, Kind.FORWARD, 0):
            before = losses_before[Action(Kind.FORWARD, i, 0)]
            yield before, 0, Action(Kind.PREPARE, i, CALLER)
        for k, i in enumerate(outputs):
            yield k, 1, Action(Kind.LOSS, i, n)
        for k, i in enumerate(gradients):
            certain = (q for q in range(m) if seen[q] > k)
            yield next(certain, m), 2, Action(Kind.BACKWARD, i, CALLER)

    row = sorted(ordered(), key=lambda each: each[:2])
    return replace(schedule, caller=tuple(action for _, _, action in row))


def _in_order(schedule: Schedule, kind: Kind, j: int) -> list[int]:
    """The micro-batches in the order of their actions of a kind on a stage."""
    row = schedule.rows[schedule.placement[j]]
    return [action.i for action in row if action.kind is kind and action.j == j]


def _needed(schedule: Schedule, kind: Kind, j: int, order: list[int]) -> dict[Action, int]:
    """For each action, how many of an order it needs, directly or not.

    Args:
        schedule: The schedule.
        kind, j: The kind and the stage of what is counted.
        order: The micro-batches, of which an action that needs one needs all before.
    """
    place = {Action(kind, i, j): k + 1 for k, i in enumerate(order)}
    found: dict[Action, int] = {}
    latest = [0] * len(schedule.rows)
    for action in schedule.interleaved:
        worker = schedule.worker_of(action)
        needed = [found.get(each, 0) for each in schedule.needs(action)]
        latest[worker] = found[action] = max(latest[worker], place.get(action, 0), *needed)
    return found
