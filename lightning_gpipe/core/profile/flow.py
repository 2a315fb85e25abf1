"""The values on their way between layers that run one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gpipe.core.data import FlatTree, bytes_of, copy_marks, join, parted, tree_flatten
from lightning_gpipe.core.programs import Program, Route, RouteName


class Flow:
    """A micro-batch on its way through the stages of a program, on a device."""

    def __init__(self, microbatch: Any, program: Program, device: torch.device) -> None:
        self._device = device
        self._by_route: dict[tuple[RouteName, int], FlatTree] = {}
        inputs = [microbatch] if len(program.inputs) == 1 else microbatch
        trees = (self._copied(tree_flatten(value)) for value in inputs)
        values = dict(zip(program.inputs, trees, strict=True))
        self._main = join([values[number] for number in program.first])
        for route in program.given:
            tree = join([values[number] for number in route.numbers])
            self._by_route[route.name, route.target] = tree

    def arriving(self, j: int, routes: Sequence[Route]) -> FlatTree:
        """Take the inputs of stage ``j``, joined with those that come by routes."""
        return join([self._main, *(self._by_route.pop((route.name, j)) for route in routes)])

    def leave(self, outputs: FlatTree, routes: Sequence[Route]) -> None:
        """Put the outputs of a stage on their way."""
        self._main, *others = parted(outputs, 1 + len(routes))
        for route, tree in zip(routes, others, strict=True):
            self._by_route[route.name, route.target] = tree

    def sizes(self, j: int, n: int, routes: Sequence[Route]) -> Iterator[tuple[int, int]]:
        """Yield the stages that use the outputs of stage ``j`` of ``n``, with their bytes."""
        if j + 1 < n:
            yield j + 1, _bytes(self._main)
        for route in routes:
            if route.target < n:
                yield route.target, _bytes(self._by_route[route.name, route.target])

    @property
    def bytes(self) -> int:
        """The bytes of all values."""
        return sum(map(_bytes, (self._main, *self._by_route.values())))

    @property
    def leaves(self) -> Iterator[Any]:
        """The leaves of all values."""
        for tree in (self._main, *self._by_route.values()):
            yield from tree.leaves

    def _copied(self, tree: FlatTree) -> FlatTree:
        """Copy the tensors to the device."""

        def copied(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            copy = leaf.detach().to(self._device, copy=True)
            return copy_marks(leaf, copy.requires_grad_(leaf.requires_grad))

        return FlatTree(list(map(copied, tree.leaves)), tree.spec)


def _bytes(tree: FlatTree) -> int:
    return sum(bytes_of(leaf) for leaf in tree.leaves if isinstance(leaf, Tensor))
