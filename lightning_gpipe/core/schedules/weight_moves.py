"""When a device gets the weights of its stages, and when they leave it.

Weights that live in the memory of the host are on a device only around their use. Each worker has
the stage at work and the one that it works on next: the next one comes while this one computes, and
what is neither leaves.
"""

from __future__ import annotations

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

    One worker that goes through stages 0, 1 and 2 and back, with one micro-batch::

        before | F0: load 0 and 1 | F1: load 2 |    |            | B1: load 0 |
        action | F0               | F1         | F2 | B2         | B1         | B0
        after  | drop 0           |            |    | B2: drop 2 | drop 1     | drop 0
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
