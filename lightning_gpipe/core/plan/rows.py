"""What the rows of several schedules are made of: the parts of a backward, and turns of F and B."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lightning_gpipe.core.plan.action import Action, Kind


class Backwards(NamedTuple):
    """What a backward of a micro-batch consists of.

    Attributes:
        recomputed: An integer k: the first k micro-batches drop their activations; each of their
            backwards is preceded by a recomputation.
        split: Whether the gradients of the weights are an action of their own, right after the
            backward.
    """

    recomputed: int = 0
    split: bool = False

    def of(self, i: int, j: int) -> Iterator[Action]:
        """The actions of micro-batch ``i`` on stage ``j``."""
        if i < self.recomputed:
            yield Action(Kind.RECOMPUTE, i, j)
        yield Action(Kind.BACKWARD, i, j)
        if self.split:
            yield Action(Kind.WEIGHTS, i, j)


def alternating(
    forwards: Sequence[tuple[int, int]],
    backwards: Sequence[tuple[int, int]],
    warm_up: int,
    parts: Backwards,
) -> Iterator[Action]:
    """One worker's row: some forwards, then a backward after each further forward, and the rest.

    Args:
        forwards: The micro-batch and the stage of each forward, in order.
        backwards: Those of each backward; as many.
        warm_up: How many forwards come first.
        parts: What a backward consists of.
    """
    for i, j in forwards[:warm_up]:
        yield Action(Kind.FORWARD, i, j)
    for k, backward in enumerate(backwards):
        if warm_up + k < len(forwards):
            i, j = forwards[warm_up + k]
            yield Action(Kind.FORWARD, i, j)
        yield from parts.of(*backward)
