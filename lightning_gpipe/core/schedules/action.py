"""Actions: units of work of a worker or of the caller, and their kinds.

The name of a kind, the stage that needs its result and its own needs are data of the kind, which
the schedule, the simulator, the drawing, the worker and the transport read here.

Throughout, i is one of m micro-batches and j one of n stages. The caller has the places before the
first stage and after the last: -1 and n. Between two modules of a chain, the first with the stages
up to j, it is at j.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

CALLER = -1  # the caller's place before the first stage


class Kind(Enum):
    """The kind of an action.

    A whole backward computes the gradients of a stage's inputs and those of its parameters. Where
    it is split, B computes the former, which another stage waits for, and W the latter, for which
    no action waits.

    Attributes:
        verb: The name in an error message.
        direction: The stage that needs the result, relative to the action's own.
        after: The actions on the same micro-batch that it needs: the letters of their kinds, each
            with the place of the stage relative to its own. Not every schedule has all of them.
        cycles: The clock cycles that it takes in a table.
    """

    FORWARD = "F", "forward", 1, (("F", -1), ("P", -1))
    RECOMPUTE = "R", "recompute", 0, (("F", 0),)
    BACKWARD = "B", "backward", -1, (("P", 0), ("F", 0), ("R", 0), ("B", 1), ("L", 1), ("C", 0))
    WEIGHTS = "W", "weights", 0, (("B", 0),)
    PREPARE = "P", "prepare", 1, (("F", 0),)  # the caller's code up to its call of a module
    LOSS = "L", "loss", -1, (("F", -1),)  # from the output to the loss, and the loss's backward
    CODE = "C", "code", -1, (("B", 1),)  # backward through the caller's code between two modules
    GRADIENTS = "G", "gradients", 0, (("B", 0), ("W", 0)), 0  # the stage's, which go home

    def __init__(
        self,
        letter: str,
        verb: str,
        direction: int,
        after: tuple[tuple[str, int], ...],
        cycles: int = 1,
    ) -> None:
        self.letter = letter
        self.verb = verb
        self.direction = direction
        self.after = after
        self.cycles = cycles

    __hash__ = object.__hash__  # the fastest: actions are dictionary keys on the hot path


_KIND_OF = {kind.letter: kind for kind in Kind}


class Action(NamedTuple):
    """One unit of work: ``kind`` of micro-batch ``i`` on stage ``j``."""

    kind: Kind
    i: int
    j: int

    @property
    def by_caller(self) -> bool:
        return self.j < 0 or self.kind in (Kind.PREPARE, Kind.LOSS, Kind.CODE)

    def __str__(self) -> str:
        return f"{self.kind.letter}{self.i}"


class Span(NamedTuple):
    """The time of an action, recorded or predicted; the number of workers stands for the caller."""

    worker: int
    action: Action
    start: float
    end: float


Row = tuple[Action, ...]


@lru_cache(maxsize=2**16)
def successor(action: Action) -> Action:
    """Return the action on the neighbouring stage, or the caller, that needs the result."""
    return Action(action.kind, action.i, action.j + action.kind.direction)


def predecessors(action: Action) -> Iterator[Action]:
    """Yield the actions that must have ended before ``action``; not all may exist."""
    kind, i, j = action
    for letter, offset in kind.after:
        yield Action(_KIND_OF[letter], i, j + offset)
