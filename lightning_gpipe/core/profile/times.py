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


class Backward:
    """What a backward takes, or a part of it: the first of a mini-batch, and each later one."""

    def __init__(self) -> None:
        self._first: list[float] = []
        self._later: list[float] = []

    def add(self, first: float, later: float) -> None:
        """Take a measurement of both."""
        self._first.append(first)
        self._later.append(later)

    @property
    def measured(self) -> bool:
        """Whether it was measured."""
        return bool(self._first)

    def of(self, chunks: int) -> float:
        """The mean in a mini-batch of so many micro-batches, by the medians."""
        return (median(self._first) + (chunks - 1) * median(self._later)) / chunks


class Times:
    """What a stage took for micro-batches of one size, a round after another."""

    def __init__(self) -> None:
        self._forward: list[float] = []
        self._dropping: list[float] = []
        self._backward, self._inputs, self._weights = Backward(), Backward(), Backward()

    def measure(
        self,
        stage: Stage,
        program: Program | None,
        inputs: FlatTree,
        meter: Meter,
        gradients: Gradients,
        *,
        split: bool = False,
    ) -> FlatTree:
        """Run two micro-batches, one of which is recomputed: F0 F1 R1 B1 B0.

        To measure backwards in two parts, two others: F0 F1 B1 W1 B0 W0.

        Args:
            stage: The stage.
            program: What the stages run, if that is not their layers.
            inputs: What it takes.
            meter: Measures seconds.
            gradients: Gets the gradients of the stage's parameters.
            split: Whether to measure backwards in two parts.

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
        self._backward.add(first, later)
        if split:
            self._measure_parts(stage, program, inputs, meter, gradients)
        return outputs

    def _measure_parts(
        self,
        stage: Stage,
        program: Program | None,
        inputs: FlatTree,
        meter: Meter,
        gradients: Gradients,
    ) -> None:
        with alone(stage, program, split=True) as each:
            outputs = [each.forward(i, inputs.detached()) for i in (0, 1)]
            taken = []
            for i in (1, 0):
                _, of_inputs = meter(partial(each.backward, i, gradients_for(outputs[i])))
                _, of_weights = meter(partial(each.weights, i))
                taken.append((of_inputs, of_weights))
            gradients.keep(each.take_gradients())
        firsts, laters = taken
        self._inputs.add(firsts[0], laters[0])
        self._weights.add(firsts[1], laters[1])

    def of(self, chunks: int) -> dict[str, float]:
        """The time of each action in a mini-batch of so many micro-batches: the medians."""
        found = {
            "forward": median(self._forward),
            "dropping": median(self._dropping),
            "backward": self._backward.of(chunks),
        }
        if self._inputs.measured:
            found |= {"inputs": self._inputs.of(chunks), "weights": self._weights.of(chunks)}
        return found
