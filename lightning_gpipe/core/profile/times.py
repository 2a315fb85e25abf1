"""The times of a layer, measured as a mini-batch runs it.

A layer that runs repeatedly finds its parameters in the cache, and its gradients in memory that is
in use. In a mini-batch other layers run in between; the first backward makes a gradient, in fresh
memory, and later ones add to it. So the layers are measured in rounds, each of them once in a
round, and the gradients of several layers are alive at once. If the machine is slow for a moment,
that is one measurement of many layers, not all measurements of one; medians leave it out.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from statistics import median

from torch import Tensor

from lightning_gpipe.core.data import FlatTree, bytes_of
from lightning_gpipe.core.profile.meters import Meter
from lightning_gpipe.core.profile.single_layer import alone, gradients_for
from lightning_gpipe.core.programs import Program
from lightning_gpipe.core.run import Stage

_ALIVE = 2**28  # bytes; more than caches have, and than memory that is freed and soon used again


class Times:
    """The times of a stage for micro-batches of one size, in several rounds."""

    def __init__(self) -> None:
        self._forward: list[float] = []
        self._dropping: list[float] = []
        # Of backwards or their parts: the first of a mini-batch, and each later one.
        self._backward: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)

    def measure(
        self,
        stage: Stage,
        program: Program,
        inputs: FlatTree,
        meter: Meter,
        gradients: list[Tensor],
        *,
        split: bool = False,
    ) -> FlatTree:
        """Run two micro-batches, one of which is recomputed: F0 F1 R1 B1 B0; return the outputs.

        To measure backwards in two parts, run two others: F0 F1 B1 W1 B0 W0. ``gradients`` are the
        ones that are alive, and get those of the stage.
        """
        with alone(stage, program, recomputed=[1]) as single:
            outputs, forward = meter(partial(single.forward, 0, inputs.detached()))
            _, dropping = meter(partial(single.forward, 1, inputs.detached()))
            single.recompute(1)
            _, first = meter(partial(single.backward, 1, gradients_for(outputs)))
            _, later = meter(partial(single.backward, 0, gradients_for(outputs)))
            _keep_alive(gradients, single.take_gradients())
        self._forward.append(forward)
        self._dropping.append(dropping)
        self._backward["backward"].append((first, later))
        if split:
            self._measure_parts(stage, program, inputs, meter, gradients)
        return outputs

    def _measure_parts(
        self,
        stage: Stage,
        program: Program,
        inputs: FlatTree,
        meter: Meter,
        gradients: list[Tensor],
    ) -> None:
        with alone(stage, program, split=True) as single:
            outputs = [single.forward(i, inputs.detached()) for i in (0, 1)]
            pairs = []
            for i in (1, 0):
                _, of_inputs = meter(partial(single.backward, i, gradients_for(outputs[i])))
                _, of_weights = meter(partial(single.weights, i))
                pairs.append((of_inputs, of_weights))
            _keep_alive(gradients, single.take_gradients())
        (first_inputs, first_weights), (later_inputs, later_weights) = pairs
        self._backward["inputs"].append((first_inputs, later_inputs))
        self._backward["weights"].append((first_weights, later_weights))

    def of(self, chunks: int) -> dict[str, float]:
        """Return the mean time of each action in a mini-batch of ``chunks``, by the medians."""
        times = {"forward": median(self._forward), "dropping": median(self._dropping)}
        for name, pairs in self._backward.items():
            first, later = map(median, zip(*pairs, strict=True))
            times[name] = (first + (chunks - 1) * later) / chunks
        return times


def _keep_alive(gradients: list[Tensor], new: list[tuple[Tensor, Tensor]]) -> None:
    """Add the gradients of one more layer; drop all if they are too large."""
    gradients += [gradient for _, gradient in new]
    if sum(map(bytes_of, gradients)) > _ALIVE:
        gradients.clear()
