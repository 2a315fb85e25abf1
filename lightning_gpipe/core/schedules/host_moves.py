"""The moves of a device from and to the memory of the host, by the row of its worker.

Weights that live there, or that replicas have divided, are on a device only for the stage at work
and the one that its worker works on next. Activations that wait there for their backward leave
after their forward, and come back while the action before is at work.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, groupby
from math import inf
from typing import NamedTuple

from lightning_gpipe.core.schedules.action import Action, Kind, Row
from lightning_gpipe.core.schedules.placement import check_for_each_stage, is_number


class WeightMoves(NamedTuple):
    """The stages whose weights begin to come before an action, or leave after it."""

    loads: tuple[int, ...] = ()
    drops: tuple[int, ...] = ()


@lru_cache(maxsize=256)
def weight_moves(row: Row) -> dict[Action, WeightMoves]:
    """Return the moves of a worker's row; actions without any are left out.

    A worker that goes through its stages 0, 1 and 2, and back::

        at work   | stage 0 | 1 | 2 | 1 | 0
        loads     | 0 and 1 | 2 |   | 0 |
        drops     | 0       |   | 2 | 1 | 0
    """
    uses = (action for action in row if action.kind is not Kind.GRADIENTS)
    turns = [(j, list(actions)) for j, actions in groupby(uses, lambda action: action.j)]
    stages = [j for j, _ in turns]
    moves: dict[Action, WeightMoves] = {}
    here: set[int] = set()
    for k, (j, actions) in enumerate(turns):
        if loads := tuple(other for other in stages[k : k + 2] if other not in here):
            moves[actions[0]] = WeightMoves(loads)
            here.update(loads)
        if j not in stages[k + 1 : k + 3]:
            last = moves.get(actions[-1], WeightMoves())
            moves[actions[-1]] = last._replace(drops=(j,))
            here.discard(j)
    return moves


def weight_moves_at_once(row: Row) -> dict[Action, WeightMoves]:
    """Return the moves of a worker that has the weights of all its stages during a whole row."""
    uses = [action for action in row if action.kind is not Kind.GRADIENTS]
    if not uses:
        return {}
    stages = tuple(sorted({action.j for action in uses}))
    moves = {uses[0]: WeightMoves(loads=stages)}
    moves[uses[-1]] = moves.get(uses[-1], WeightMoves())._replace(drops=stages)
    return moves


_SOON = 2  # actions, in which it does not pay to leave

OffloadActivations = bool | Sequence[int]
Visit = tuple[int, int]  # a micro-batch and a stage


def check_offload_activations(value: OffloadActivations, stages: int | None = None) -> None:
    """Refuse a value that is neither a bool nor a list of numbers, one for each stage."""
    if isinstance(value, bool):
        return
    numbers = list(value) if isinstance(value, list | tuple) else []
    if not numbers or not all(map(is_number, numbers)) or min(numbers) < 0:
        raise ValueError(
            "offload_activations must be True, False, 'auto' or a list of numbers of "
            f"micro-batches, 0 or more, one for each stage: got {value!r}."
        )
    if stages is not None:
        check_for_each_stage("offload_activations", numbers, stages)


def offloaded_by_stage(value: OffloadActivations, n: int) -> tuple[float, ...]:
    """Return how many micro-batches of each of ``n`` stages wait on the host; inf are all.

    >>> offloaded_by_stage(True, n=2)
    (inf, inf)
    >>> offloaded_by_stage([3, 0], n=2)
    (3.0, 0.0)
    """
    if isinstance(value, bool):
        return (inf if value else 0.0,) * n
    return tuple(map(float, value))


@lru_cache(maxsize=256)
def activation_moves(
    row: Row, waiting: tuple[tuple[int, float], ...]
) -> tuple[frozenset[Action], Mapping[Action, Visit]]:
    """Return the moves of the activations in a worker's row.

    Activations that are needed again soon stay, here those of micro-batch 2::

        F0 F1 F2 B2 B1 B0
        after F0: 0 leaves; after F1: 1 leaves; before B2: 1 comes; before B1: 0 comes

    ``waiting`` says of stages how many of the micro-batches that each holds at its peak wait on the
    host: those that would be held longest. Returns the forwards after which activations leave, and
    what begins to come before an action.
    """
    computing = [action for action in row if action.kind is not Kind.GRADIENTS]
    forwards: dict[Visit, int] = {}
    visits: dict[int, list[_Span]] = {j: [] for j, _ in waiting}  # by stage, in order of their ends
    for k, action in enumerate(computing):
        visit = action.i, action.j
        if action.kind is Kind.FORWARD:
            forwards[visit] = k
        elif visit in forwards:  # this is the first action after its forward
            visits.get(action.j, []).append(_Span(forwards.pop(visit), k))
    leaving: list[Action] = []
    coming: dict[Action, Visit] = {}
    for j, number in waiting:
        for start, end in _longest(visits[j], number):
            if end - start > _SOON:
                leaving.append(computing[start])
                coming[computing[end - 1]] = computing[start].i, j
    return frozenset(leaving), coming


class _Span(NamedTuple):
    """The positions in a row between which something is held."""

    start: int
    end: int


def _longest(spans: Sequence[_Span], number: float) -> Iterator[_Span]:
    """Yield as few spans as lessen the most that overlap by ``number``, those that end last."""
    turns = sorted([(x.start, 1) for x in spans] + [(x.end, -1) for x in spans])
    room = max(0, max(accumulate((change for _, change in turns), initial=0)) - number)
    held: list[_Span] = []
    for span in sorted(spans):
        held = [x for x in held if x.end > span.start] + [span]
        if len(held) > room:
            last = max(held, key=lambda x: x.end)
            held.remove(last)
            yield last
