"""One worker's row in brief, from which its actions follow: turns of F and B, parts of a backward.

The rows of all schedules here are of one kind: some forwards, then a backward after each further
forward, and the rest of the backwards. What differs is the order in which micro-batches and stages
are visited, with how many forwards a row begins, and when the gradients of the weights follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_gpipe.core.plan.action import Action, Kind

Visit = tuple[int, int]  # a micro-batch and a stage


@dataclass(frozen=True)
class Pattern:
    """How the row of one worker goes.

    Attributes:
        forwards: The micro-batch and the stage of each forward, in order.
        backwards: Those of each backward; as many.
        warm_up: How many forwards come first; all of them before any backward, if it is as many.
        recomputed: An integer k: the first k micro-batches drop their activations; each of their
            backwards is preceded by a recomputation.
        split: Whether the gradients of the weights are an action of their own.
        late: How many further backwards come before that.
    """

    forwards: Sequence[Visit]
    backwards: Sequence[Visit]
    warm_up: int
    recomputed: int = 0
    split: bool = False
    late: int = 0

    def actions(self) -> Iterator[Action]:
        """The actions, in order."""
        for i, j in self.forwards[: self.warm_up]:
            yield Action(Kind.FORWARD, i, j)
        for k, (i, j) in enumerate(self.backwards):
            for forward in self.forwards[self.warm_up + k : self.warm_up + k + 1]:
                yield Action(Kind.FORWARD, *forward)
            if i < self.recomputed:
                yield Action(Kind.RECOMPUTE, i, j)
            yield Action(Kind.BACKWARD, i, j)
            if self.split and k >= self.late:
                yield Action(Kind.WEIGHTS, *self.backwards[k - self.late])
        if self.split:
            for visit in self.backwards[max(0, len(self.backwards) - self.late) :]:
                yield Action(Kind.WEIGHTS, *visit)
