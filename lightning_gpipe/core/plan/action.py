"""One unit of a worker's work, and the kinds that there are.

What a kind is called, which way its result goes and what it comes after are data of the kind: a
schedule, the simulator, the drawing, the worker and the transport all read them here.

Throughout, i is one of m micro-batches and j one of n stages.
"""

from __future__ import annotations

from enum import Enum
from functools import lru_cache
from typing import NamedTuple


class Kind(Enum):
    """What an action does with its micro-batch.

    Attributes:
        letter: What stands for it in a table.
        verb: What it does, in the words of a message.
        direction: How many stages further its result is needed: 1 by the next, -1 by the one
            before, 0 by an action of the same stage.
        after: The letters of the kinds that, on the same stage for the same micro-batch, come
            before it.
    """

    FORWARD = "F", "forward", 1, ""
    RECOMPUTE = "R", "recompute", 0, "F"
    BACKWARD = "B", "backward", -1, "FR"

    def __init__(self, letter: str, verb: str, direction: int, after: str) -> None:
        self.letter = letter
        self.verb = verb
        self.direction = direction
        self.after = after

    __hash__ = object.__hash__  # as fast as can be: actions are keys on the hot path


class Action(NamedTuple):
    """One unit of work: ``kind`` of micro-batch ``i`` on stage ``j``."""

    kind: Kind
    i: int
    j: int

    def __str__(self) -> str:
        return f"{self.kind.letter}{self.i}"


Row = tuple[Action, ...]


@lru_cache(maxsize=2**16)
def successor(action: Action) -> Action:
    """The action that needs what ``action`` makes, on the stage beside.

    Past the last stage and before the first it stands for the caller.
    """
    return Action(action.kind, action.i, action.j + action.kind.direction)
