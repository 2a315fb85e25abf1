"""Counts the bytes that layers save and hand on, in a first run of each.

Of layers that are alike only the first runs. Those that are alike but for their own numbers might
compute with these, so all of them run with the fewest rows: what they save tells whether they do. A
tensor that two layers save, as the output of one and the input of the next, counts once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_gpipe.core.data import FlatTree, bytes_of, has_own_dispatch, parted, requires_grad
from lightning_gpipe.core.faithful import Manager
from lightning_gpipe.core.profile.alike import KindOf, key_of, repeated
from lightning_gpipe.core.profile.meters import Meter
from lightning_gpipe.core.profile.single_layer import Flow, alone, gradients_for, tensors_in
from lightning_gpipe.core.programs import Program, Route
from lightning_gpipe.core.run import Stage


class SavedBytes:
    """Counts the bytes that layers save: ``number`` has those of the latest, counted once."""

    def __init__(self) -> None:
        self.number = 0
        self._counted: set[int] = set()  # the storages of tensors on their way
        self._ignored: set[int] = set()

    def counting(self) -> Manager:
        """Count tensors saved in a ``with`` block; their graph must outlive the block."""
        self.number = 0
        self._ignored.clear()

        def pack(tensor: Tensor) -> Tensor:
            key = _key(tensor)
            if key not in self._ignored and key not in self._counted:
                self._counted.add(key)
                self.number += _size(tensor)
            return tensor.detach()  # an output would keep its own graph alive

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Do not count the parameters and buffers of the layer, which are in memory anyway."""
        self._ignored.update(map(_key, tensors))

    def are_counted(self, leaves: Iterable[Any]) -> list[bool]:
        return [isinstance(leaf, Tensor) and _key(leaf) in self._counted for leaf in leaves]

    def since(self, before: Iterable[bool], leaves: Iterable[Any]) -> list[int]:
        """Return the bytes of each leaf that was counted since ``before``, else 0."""
        sizes, seen = [], set()
        for was_counted, leaf in zip(before, leaves, strict=True):
            key = _key(leaf) if isinstance(leaf, Tensor) and not was_counted else None
            sizes.append(_size(leaf) if key in self._counted and key not in seen else 0)
            seen.add(key)
        return sizes

    def count(self, leaves: Iterable[Any], counted: Iterable[bool]) -> None:
        """Remember leaves as counted, like those of a layer that is alike."""
        pairs = zip(leaves, counted, strict=True)
        self._counted.update(_key(leaf) for leaf, was_counted in pairs if was_counted)

    def keep(self, leaves: Iterable[Any]) -> None:
        """Forget all tensors but these."""
        self._counted &= {_key(leaf) for leaf in leaves if isinstance(leaf, Tensor)}


def bytes_beside(tensors: Iterable[Tensor], others: Iterable[Tensor]) -> int:
    """Return the bytes of tensors whose memory is not that of others."""
    sizes = {_key(tensor): _size(tensor) for tensor in tensors}
    return sum(sizes[key] for key in sizes.keys() - set(map(_key, others)))


def _key(tensor: Tensor) -> int:
    """Return the address of its storage, which lives as long as the graph that has saved it."""
    return tensor.untyped_storage()._cdata if _has_storage(tensor) else id(tensor)


def _size(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() if _has_storage(tensor) else bytes_of(tensor)


def _has_storage(tensor: Tensor) -> bool:
    dense = tensor.layout is torch.strided and not tensor.is_nested
    return dense and not has_own_dispatch(tensor)


Ends = tuple[int, int]  # the indices of the layer that makes a value, and of one that uses it


class LayerRun(NamedTuple):
    """The costs and outputs of a run of a layer, and the bytes of inputs that it saves first."""

    costs: dict[str, float]
    first: list[int]
    outputs: FlatTree


class LayerCounter:
    """Counts layers, in order, for a micro-batch.

    The counter of one with ``fewer`` rows, which goes first, tells whether layers that are alike
    but for their own numbers save as much.

    Attributes:
        costs: The bytes that each layer saves, and the costs of a run.
        sizes, saved: The bytes that layers hand to later ones, and those first saved there.
        waited: For each layer, whether any of its inputs requires a gradient.
        kinds: For each layer, the number of its kind, and its place among the layers of that kind.
        alike: The number of layers of each kind.
        outputs: The outputs of a run of each kind, where layers are repeated.
    """

    def __init__(
        self,
        program: Program,
        meter: Meter,
        stages: Sequence[Stage],
        kind_of: KindOf,
        fewer: LayerCounter | None,
        *,
        split: bool,
    ) -> None:
        self.costs: list[dict[str, float]] = []
        self.sizes: defaultdict[Ends, float] = defaultdict(float)
        self.saved: defaultdict[Ends, float] = defaultdict(float)
        self.output = 0
        self.waited: list[bool] = []
        self.kinds: list[tuple[int, int]] = []
        self.alike: Counter[int] = Counter()
        self.outputs: dict[int, FlatTree] = {}
        self._program, self._meter, self._split = program, meter, split
        self._bytes = SavedBytes()
        self._kind_of, self._fewer = kind_of, fewer
        self._repeated = repeated(stages, kind_of)
        self._numbers: dict[Hashable, int] = {}  # of kinds
        # The runs of repeated layers that differ, and which of their outputs were counted.
        self._runs: dict[Hashable, tuple[LayerRun, list[bool]]] = {}

    def visit(self, stage: Stage, flow: Flow) -> None:
        j = stage.partition.index
        arriving, leaving = ends_of(stage, self._program)
        inputs = flow.arriving(j, arriving)
        run = self._count(stage, inputs)
        part = self._program.parts[j]
        key = key_of(stage, part, inputs, self._kind_of, numbered=False), run.costs["saved"]
        kind = self._numbers.setdefault(key, len(self._numbers))
        self.kinds.append((kind, self.alike[kind]))
        self.alike[kind] += 1
        if self._repeated[j]:
            self.outputs.setdefault(kind, run.outputs)
        self.costs.append(run.costs)
        self.waited.append(any(map(requires_grad, inputs.leaves)))
        first = FlatTree(run.first, inputs.spec)
        makers = [j - 1, *(route.source for route in arriving)]
        for maker, tree in zip(makers, parted(first, len(makers)), strict=True):
            if maker >= 0:  # a layer, and not the caller
                self.saved[maker, j] += sum(tree.leaves)
        flow.leave(run.outputs, leaving)
        self._bytes.keep(flow.leaves)
        for user, size in flow.sizes(j, len(self._repeated), leaving):
            self.sizes[j, user] += size
        self.output = flow.bytes

    def _count(self, stage: Stage, inputs: FlatTree) -> LayerRun:
        j = stage.partition.index
        if not self._repeated[j]:
            return self._run(stage, inputs)
        counted = self._bytes.are_counted(inputs.leaves)
        part, kind = self._program.parts[j], self._fewer and self._fewer.kinds[j][0]
        alike = key_of(stage, part, inputs, self._kind_of, numbered=kind is None)
        key = alike, kind, tuple(counted)
        if key not in self._runs:
            run = self._run(stage, inputs)
            self._runs[key] = run, self._bytes.are_counted(run.outputs.leaves)
        run, counted = self._runs[key]
        self._bytes.count(run.outputs.leaves, counted)
        return run

    def _run(self, stage: Stage, inputs: FlatTree) -> LayerRun:
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
        return LayerRun(costs, self._bytes.since(before, inputs.leaves), outputs)

    def _parts(self, stage: Stage, inputs: FlatTree) -> dict[str, float]:
        with alone(stage, self._program, split=True) as third:
            outputs = third.forward(0, inputs.detached())
            _, of_inputs = self._meter(partial(third.backward, 0, gradients_for(outputs)))
            left = bytes_beside(third.kept_for_weights(0), tensors_in(stage))
            _, of_weights = self._meter(partial(third.weights, 0))
        return {"inputs": of_inputs, "weights": of_weights, "left": float(left)}


def ends_of(stage: Stage, program: Program) -> tuple[tuple[Route, ...], tuple[Route, ...]]:
    """Return the routes by which values come to a stage, and those by which they leave."""
    part = program.parts[stage.partition.index]
    return (*stage.arriving, *part.arriving), (*stage.leaving, *part.leaving)
