"""The moves of a device from and to the memory of the host, by the row of its worker.

Weights that live there are on a device only around their use. Each worker has those of the stage at
work and of the one that it works on next: the next ones come while this one computes, and what is
neither leaves. Activations that wait there for their backward leave after their forward, and come
back while the action before is at work.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from lightning_gpipe.core.schedules.action import Action, Kind, Row


class WeightMoves(NamedTuple):
    """The moves at one action, as indices of stages.

    Attributes:
        loads: The stages whose weights begin to come before the action.
        drops: The stages whose weights leave after it.
    """

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


_SOON = 2  # actions, in which it does not pay to leave

Visit = tuple[int, int]  # a micro-batch and a stage


@lru_cache(maxsize=256)
def activation_moves(row: Row) -> tuple[frozenset[Action], Mapping[Action, Visit]]:
    """Return the moves of the activations in a worker's row.

    Activations that are needed again soon stay, here those of micro-batch 2::

        F0 F1 F2 B2 B1 B0
        after F0: 0 leaves; after F1: 1 leaves; before B2: 1 comes; before B1: 0 comes

    Returns:
        The forwards after which activations leave, and what begins to come before an action.
    """
    computing = [action for action in row if action.kind is not Kind.GRADIENTS]
    forwards = {(a.i, a.j): k for k, a in enumerate(computing) if a.kind is Kind.FORWARD}
    leaving: list[Action] = []
    coming: dict[Action, Visit] = {}
    for k, action in enumerate(computing):
        visit = action.i, action.j
        if action.kind is Kind.FORWARD or visit not in forwards:
            continue
        forward = forwards.pop(visit)  # this is the first action after it
        if k - forward > _SOON:
            leaving.append(computing[forward])
            coming[computing[k - 1]] = visit
    return frozenset(leaving), coming
