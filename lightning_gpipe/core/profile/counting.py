"""What is counted of layers: the bytes that they save and hand on, and what a run costs."""

from __future__ import annotations

from collections import defaultdict
from functools import partial

from torch import Tensor

from lightning_gpipe.core.data import FlatTree, parted
from lightning_gpipe.core.plan import CALLER, Program, Route
from lightning_gpipe.core.profile.alike import Alike, Ran
from lightning_gpipe.core.profile.alone import alone, gradients_for, tensors_in
from lightning_gpipe.core.profile.flow import Flow
from lightning_gpipe.core.profile.meters import Meter
from lightning_gpipe.core.profile.saved import SavedBytes, bytes_beside
from lightning_gpipe.core.run import Stage

Ends = tuple[int, int]  # the layer that makes a value, and the one that uses it


class Counting:
    """Counts layers, in order, for a micro-batch.

    Args:
        program: What they run, if that is not one after another.
        meter: Measures one run.
        split: Whether to count backwards in two parts, too.

    Attributes:
        costs: For each layer the bytes that it saves, and what a run costs.
        sizes: The bytes of what layers hand to later ones.
        saved: The bytes of it that the user is the first to save.
        output: The bytes of what the last layer makes.
        waited: For each layer, whether any of its inputs requires a gradient.
    """

    def __init__(self, program: Program | None, meter: Meter, *, split: bool) -> None:
        self.costs: list[dict[str, float]] = []
        self.sizes: defaultdict[Ends, float] = defaultdict(float)
        self.saved: defaultdict[Ends, float] = defaultdict(float)
        self.output = 0
        self.waited: list[bool] = []
        self._program, self._meter, self._split = program, meter, split
        self._bytes = SavedBytes()
        self._alike = Alike()

    def visit(self, stage: Stage, flow: Flow, last: int) -> None:
        """Run one layer, on what is on its way.

        Args:
            stage: The layer, as a stage of its own.
            flow: What is on its way.
            last: The index of the last layer.
        """
        j = stage.partition.index
        arriving, leaving = ends_of(stage, self._program)
        inputs = flow.arriving(j, arriving)
        ran = self._ran(stage, inputs)
        self.costs.append(ran.costs)
        tensors = (leaf for leaf in inputs.leaves if isinstance(leaf, Tensor))
        self.waited.append(any(each.requires_grad for each in tensors))
        first = FlatTree(ran.first, inputs.spec)
        makers = [j - 1, *(route.source for route in arriving)]
        for maker, way in zip(makers, parted(first) if arriving else [first], strict=True):
            if maker != CALLER:
                self.saved[maker, j] += sum(way.leaves)
        flow.leave(ran.outputs, leaving)
        self._bytes.keep(flow.leaves)
        for user, size in flow.sizes(j, last + 1, leaving):
            self.sizes[j, user] += size
        self.output = flow.bytes

    def _ran(self, stage: Stage, inputs: FlatTree) -> Ran:
        run = partial(self._run, stage, inputs)
        if not self._meter.exact:
            return run()
        part = None if self._program is None else self._program.parts[stage.partition.index]
        return self._alike.count(stage, part, inputs, self._bytes, run)

    def _run(self, stage: Stage, inputs: FlatTree) -> Ran:
        with alone(stage, self._program) as first:  # in which a stage copies all its inputs
            first.forward(0, inputs.detached())
        before = self._bytes.are_counted(inputs.leaves)
        with self._bytes.counting(), alone(stage, self._program) as second:
            self._bytes.ignore(tensors_in(stage))
            outputs, forward = self._meter(partial(second.forward, 0, inputs.detached()))
            _, backward = self._meter(partial(second.backward, 0, gradients_for(outputs)))
        saved = float(self._bytes.number)
        costs = {"saved": saved, "forward": forward, "dropping": forward, "backward": backward}
        if self._split:
            costs |= self._parts(stage, inputs)
        return Ran(costs, self._bytes.since(before, inputs.leaves), outputs)

    def _parts(self, stage: Stage, inputs: FlatTree) -> dict[str, float]:
        """What the two parts of a backward cost, and keep between them."""
        with alone(stage, self._program, split=True) as third:
            outputs = third.forward(0, inputs.detached())
            _, of_inputs = self._meter(partial(third.backward, 0, gradients_for(outputs)))
            left = bytes_beside(third.kept_for_weights(0), tensors_in(stage))
            _, of_weights = self._meter(partial(third.weights, 0))
        return {"inputs": of_inputs, "weights": of_weights, "left": float(left)}


def ends_of(stage: Stage, program: Program | None) -> tuple[tuple[Route, ...], tuple[Route, ...]]:
    """The routes by which values come to a stage, and those by which they leave."""
    if program is None:
        return stage.arriving, stage.leaving
    part = program.parts[stage.partition.index]
    return (*stage.arriving, *part.arriving), (*stage.leaving, *part.leaving)
