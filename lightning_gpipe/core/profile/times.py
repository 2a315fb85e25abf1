"""The times of a layer, measured as a mini-batch runs it.

A layer that runs again and again finds its parameters in the cache, and its gradients in memory
that is in use. In a mini-batch other layers run in between; the first backward makes a gradient, in
memory that is fresh, and later ones add to it. So the layers are measured in rounds, each of them
once in a round, and the gradients of several layers are alive at once. A round takes some time, so
that a machine which is slow for a moment is slow for one measurement of many layers, not for all
measurements of one; medians leave it out.
"""

from __future__ import annotations

from functools import partial
from statistics import median

from torch import Tensor

from lightning_gpipe.core.data import FlatTree, bytes_of
from lightning_gpipe.core.plan import Program
from lightning_gpipe.core.profile.alone import alone, gradients_for
from lightning_gpipe.core.profile.meters import Meter
from lightning_gpipe.core.run import Stage

_ALIVE = 2**28  # bytes; more than caches have, and than memory that is freed and soon used again


class Gradients:
    """The gradients that layers made lately, as many as there may be at once."""

    def __init__(self) -> None:
        self._alive: list[Tensor] = []
        self._bytes = 0

    def keep(self, gradients: list[tuple[Tensor, Tensor]]) -> None:
        """Keep those of one more layer; if they are too many, drop all."""
        self._alive += [gradient for _, gradient in gradients]
        self._bytes += sum(bytes_of(gradient) for _, gradient in gradients)
        if self._bytes > _ALIVE:
            self.drop()

    def drop(self) -> None:
        """Drop all, as before the next mini-batch."""
        self._alive.clear()
        self._bytes = 0


class Times:
    """What a stage took for micro-batches of one size, a round after another."""

    def __init__(self) -> None:
        self._forward: list[float] = []
        self._dropping: list[float] = []
        self._first: list[float] = []
        self._later: list[float] = []

    def measure(
        self,
        stage: Stage,
        program: Program | None,
        inputs: FlatTree,
        meter: Meter,
        gradients: Gradients,
    ) -> FlatTree:
        """Run two micro-batches, one of which is recomputed: F0 F1 R1 B1 B0.

        Args:
            stage: The stage.
            program: What the stages run, if that is not their layers.
            inputs: What it takes.
            meter: Measures seconds.
            gradients: Gets the gradients of the stage's parameters.

        Returns:
            What the stage makes.
        """
        with alone(stage, program, recomputed=[1]) as each:
            outputs, forward = meter(partial(each.forward, 0, inputs.detached()))
            _, dropping = meter(partial(each.forward, 1, inputs.detached()))
            each.recompute(1)
            _, first = meter(partial(each.backward, 1, gradients_for(outputs)))
            _, later = meter(partial(each.backward, 0, gradients_for(outputs)))
            gradients.keep(each.take_gradients())
        self._forward.append(forward)
        self._dropping.append(dropping)
        self._first.append(first)
        self._later.append(later)
        return outputs

    def of(self, chunks: int) -> dict[str, float]:
        """The time of each action in a mini-batch of so many micro-batches: the medians."""
        first, later = median(self._first), median(self._later)
        return {
            "forward": median(self._forward),
            "dropping": median(self._dropping),
            "backward": (first + (chunks - 1) * later) / chunks,
        }
