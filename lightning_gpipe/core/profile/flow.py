"""What is on its way between layers that run one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gpipe.core.data import FlatTree, bytes_of, copy_marks, join, parted, tree_flatten
from lightning_gpipe.core.plan import Program, Route, RouteName


class Flow:
    """A micro-batch on its way through stages.

    Args:
        microbatch: The micro-batch: what the first layer takes, or the values of the program's
            inputs.
        program: What the stages run, if that is not their layers.
        device: Where they run.
    """

    def __init__(self, microbatch: Any, program: Program | None, device: torch.device) -> None:
        self._device = device
        self._by_route: dict[tuple[RouteName, int], FlatTree] = {}
        if program is None:
            self._main = self._entering(tree_flatten(microbatch))
            return
        trees = (self._entering(tree_flatten(value)) for value in microbatch)
        values = dict(zip(program.inputs, trees, strict=True))
        self._main = join([values[number] for number in program.first])
        for route in program.given:
            tree = join([values[number] for number in route.numbers])
            self._by_route[route.name, route.target] = tree

    def arriving(self, j: int, routes: Sequence[Route]) -> FlatTree:
        """What stage ``j`` takes; what comes by routes is joined with it."""
        if not routes:
            return self._main
        return join([self._main, *(self._by_route.pop((route.name, j)) for route in routes)])

    def leave(self, outputs: FlatTree, routes: Sequence[Route]) -> None:
        """Take what a stage has made."""
        self._main, *others = parted(outputs) if routes else [outputs]
        for route, tree in zip(routes, others, strict=True):
            self._by_route[route.name, route.target] = tree

    def sizes(self, j: int, n: int, routes: Sequence[Route]) -> Iterator[tuple[int, int]]:
        """The stages that use what stage ``j`` of ``n`` has just made, with the bytes of it."""
        if j + 1 < n:
            yield j + 1, _bytes(self._main)
        for route in routes:
            if route.target < n:
                yield route.target, _bytes(self._by_route[route.name, route.target])

    @property
    def bytes(self) -> int:
        """Those of all that is on its way."""
        return sum(map(_bytes, (self._main, *self._by_route.values())))

    @property
    def leaves(self) -> Iterator[Any]:
        """All that is on its way."""
        for tree in (self._main, *self._by_route.values()):
            yield from tree.leaves

    def _entering(self, tree: FlatTree) -> FlatTree:
        """What the caller gives, in memory of its own, on the device."""
        return FlatTree([self._copied(leaf) for leaf in tree.leaves], tree.spec)

    def _copied(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        copy = leaf.detach().to(self._device, copy=True)
        return copy_marks(leaf, copy.requires_grad_(leaf.requires_grad))


def _bytes(tree: FlatTree) -> int:
    return sum(bytes_of(leaf) for leaf in tree.leaves if isinstance(leaf, Tensor))
