"""The caller's row, for schedules in which each micro-batch has a loss of its own.

The user's code for a micro-batch runs up to its call of the pipeline (P), which the first stage
waits for, and from the output to the loss (L), which the last stage waits for. At the end backward
goes on through the code before the call (B), for which nobody waits. If the pipeline is a chain of
modules, code runs between two of them, too, and backward through it (P and C): a stage waits for
each, and each waits for a stage.

The caller is one thread, so its actions need an order in which no wait for a result delays another
result that a worker waits for already, however long actions take. All that an action needs has
ended when it starts. So actions that wait come in the order of what they wait for. The first P of a
micro-batch comes as soon as all of them have run that its forward needs, and before any other; and
B after the first of them that needs the backward of the first stage. If the caller itself takes no
time, then no worker waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from lightning_gpipe.core.schedules.action import CALLER, Action, Kind
from lightning_gpipe.core.schedules.schedule import Schedule


class _Wait(NamedTuple):
    """An action of the caller, the one whose result it waits for, and the one that waits for it."""

    action: Action
    awaited: Action
    waiting: Action


def with_caller(schedule: Schedule, starts: Sequence[int]) -> Schedule:
    """Return a schedule of a single phase with the caller's row.

    ``starts`` are the first stages of the modules in a chain.
    """
    ended = schedule.simulation.end
    waits = sorted(_waits(schedule, starts), key=lambda wait: ended[wait.awaited])
    gradients = [Action(Kind.BACKWARD, i, 0) for i in schedule.order_of(Kind.BACKWARD, 0)]
    waits_before = _needed(schedule, [wait.waiting for wait in waits])
    backwards_before = _needed(schedule, gradients)

    def ordered() -> Iterator[tuple[int, int, Action]]:
        """Yield each action with its place: the number of waits before it, then its kind's."""
        for i in schedule.order_of(Kind.FORWARD, 0):
            yield waits_before[Action(Kind.FORWARD, i, 0)], 0, Action(Kind.PREPARE, i, CALLER)
        for k, wait in enumerate(waits):
            yield k, 1, wait.action
        for k, (_, i, _) in enumerate(gradients):
            certain = (q for q, wait in enumerate(waits) if backwards_before[wait.awaited] > k)
            yield next(certain, len(waits)), 2, Action(Kind.BACKWARD, i, CALLER)

    row = sorted(ordered(), key=lambda placed: placed[:2])
    return replace(schedule, caller=tuple(action for _, _, action in row))


def _waits(schedule: Schedule, starts: Sequence[int]) -> Iterator[_Wait]:
    n = schedule.n
    for i in range(schedule.m):
        output, gradient = Action(Kind.FORWARD, i, n - 1), Action(Kind.BACKWARD, i, n - 1)
        yield _Wait(Action(Kind.LOSS, i, n), output, gradient)
        for j in starts[1:]:
            before, after = (
                [Action(kind, i, stage) for kind in (Kind.FORWARD, Kind.BACKWARD)]
                for stage in (j - 1, j)
            )
            yield _Wait(Action(Kind.PREPARE, i, j - 1), before[0], after[0])
            yield _Wait(Action(Kind.CODE, i, j - 1), after[1], before[1])


def _needed(schedule: Schedule, order: Sequence[Action]) -> dict[Action, int]:
    """Return for each action the place of the last one in ``order`` that it needs, from 1 on.

    It may need it directly or not; 0 if it needs none.
    """
    place = {action: k + 1 for k, action in enumerate(order)}
    places: dict[Action, int] = {}
    latest = [0] * len(schedule.rows)
    for action in schedule.interleaved:
        worker = schedule.worker_of(action)
        needed = [places.get(need, 0) for need in schedule.needs(action)]
        latest[worker] = places[action] = max(latest[worker], place.get(action, 0), *needed)
    return places
