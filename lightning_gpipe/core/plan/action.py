"""One unit of a worker's work, and the kinds of it.

The name of a kind, the stage that needs its result and the kinds that come before it are data of
the kind: the schedule, the simulator, the drawing, the worker and the transport all read them here.

Throughout, i is one of m micro-batches and j one of n stages.
"""

from __future__ import annotations

from enum import Enum
from functools import lru_cache
from typing import NamedTuple


class Kind(Enum):
    """What an action does with its micro-batch.

    Attributes:
        letter: Its abbreviation in a table.
        verb: Its name in an error message.
        direction: The stage that needs its result, relative to its own: 1 is the next, -1 the
            previous, 0 the same.
        after: The letters of the kinds that come before it, for the same micro-batch on the same
            stage.
    """

    FORWARD = "F", "forward", 1, ""
    RECOMPUTE = "R", "recompute", 0, "F"
    BACKWARD = "B", "backward", -1, "FR"

    def __init__(self, letter: str, verb: str, direction: int, after: str) -> None:
        self.letter = letter
        self.verb = verb
        self.direction = direction
        self.after = after

    __hash__ = object.__hash__  # the fastest: actions are dictionary keys on the hot path


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
    """The action on the neighbouring stage that needs the result of ``action``.

    A stage before the first or after the last stands for the caller.
    """
    return Action(action.kind, action.i, action.j + action.kind.direction)
