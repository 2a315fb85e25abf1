"""The caller's row, for schedules in which each micro-batch has a loss of its own.

The user's code for a micro-batch runs up to its call of the pipeline (P), which the first stage
waits for, and from the output to the loss (L), which the last stage waits for. At the end backward
goes on through the code before the call (B), for which nobody waits.

The caller is one thread, so its actions need an order in which no wait for a result delays another
result that a worker waits for already, however long actions take. All that an action needs has
ended when it starts. So P comes as soon as all losses are computed that its forward needs, and
before any other loss; and B after the first loss that needs the backward of the first stage. If the
caller itself takes no time, then no worker waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lightning_gpipe.core.schedules.action import CALLER, Action, Kind
from lightning_gpipe.core.schedules.schedule import Schedule


def with_caller(schedule: Schedule) -> Schedule:
    """Return a schedule of a single phase with the caller's row."""
    m, n = schedule.m, schedule.n
    outputs = schedule.order_of(Kind.FORWARD, n - 1)
    gradients = schedule.order_of(Kind.BACKWARD, 0)
    losses_before = _needed(schedule, Kind.BACKWARD, n - 1, outputs)
    ended_before = _needed(schedule, Kind.BACKWARD, 0, gradients)
    ended = [ended_before[Action(Kind.FORWARD, i, n - 1)] for i in outputs]

    def ordered() -> Iterator[tuple[int, int, Action]]:
        """Yield each action with its place: the number of losses before it, then its kind's."""
        for i in schedule.order_of(Kind.FORWARD, 0):
            before = losses_before[Action(Kind.FORWARD, i, 0)]
            yield before, 0, Action(Kind.PREPARE, i, CALLER)
        for k, i in enumerate(outputs):
            yield k, 1, Action(Kind.LOSS, i, n)
        for k, i in enumerate(gradients):
            certain = (q for q in range(m) if ended[q] > k)
            yield next(certain, m), 2, Action(Kind.BACKWARD, i, CALLER)

    row = sorted(ordered(), key=lambda placed: placed[:2])
    return replace(schedule, caller=tuple(action for _, _, action in row))


def _needed(schedule: Schedule, kind: Kind, j: int, order: list[int]) -> dict[Action, int]:
    """Count for each action the actions of a kind on stage j that it needs, directly or not.

    These run in order, so that an action that needs one needs all before it.
    """
    place = {Action(kind, i, j): k + 1 for k, i in enumerate(order)}
    counts: dict[Action, int] = {}
    latest = [0] * len(schedule.rows)
    for action in schedule.interleaved:
        worker = schedule.worker_of(action)
        needed = [counts.get(need, 0) for need in schedule.needs(action)]
        latest[worker] = counts[action] = max(latest[worker], place.get(action, 0), *needed)
    return counts
