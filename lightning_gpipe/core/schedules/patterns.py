"""The row of one worker in brief, from which its actions follow.

The rows of most schedules are of one form: some forwards, then a backward after each further
forward, and the rest of the backwards. They differ in the order in which micro-batches and stages
are visited, in how many forwards come first, and in when the gradients of the weights follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_gpipe.core.schedules.action import Action, Kind

Visit = tuple[int, int]  # a micro-batch and a stage


@dataclass(frozen=True)
class Pattern:
    """The row of one worker in brief.

    Attributes:
        forwards: The micro-batch and the stage of each forward, in order.
        backwards: Those of each backward; as many.
        warm_up: The number of forwards before the first backward.
        recomputed: An integer k: the first k micro-batches drop their activations; each of their
            backwards is preceded by a recomputation.
        split: Whether the gradients of the weights are an action of their own.
        late: The number of further backwards before the gradients of the weights.
    """

    forwards: Sequence[Visit]
    backwards: Sequence[Visit]
    warm_up: int
    recomputed: int = 0
    split: bool = False
    late: int = 0

    def actions(self) -> Iterator[Action]:
        """Yield the actions, in order."""
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
