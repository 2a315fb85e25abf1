"""Runs layers one by one, as the engine runs stages, and passes values between them.

A layer runs on shadows of its parameters and copies of its buffers, on the device to measure, one
layer at a time: so the model may be larger, and no gradient and no hook is touched.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_gpipe.core.data import (
    FlatTree,
    bytes_of,
    change_tensors,
    join,
    parted,
    requires_grad,
    tree_flatten,
)
from lightning_gpipe.core.faithful import Write, add_note
from lightning_gpipe.core.profile.walk import current
from lightning_gpipe.core.programs import Program, Route, RouteName
from lightning_gpipe.core.run import Stage, StagePass, pass_alone
from lightning_gpipe.core.skip import using_table


@contextmanager
def alone(
    stage: Stage, program: Program, recomputed: Collection[int] = (), *, split: bool = False
) -> Iterator[StagePass]:
    """Run a stage by itself in a ``with`` block; gradients that are not taken are dropped."""
    single = pass_alone(stage, program, recomputed=recomputed, split=split)
    with single.shadows.swapped_in(stage.journal), using_table({}):
        yield single
    single.take_gradients()
    single.release()


@contextmanager
def on_its_device(stage: Stage, rows: int) -> Iterator[None]:
    """Give a stage copies of its buffers on its device in a ``with`` block; note errors."""
    copies: dict[Tensor, Tensor] = {}
    writes: list[Write] = []
    for module in stage.modules:
        for name, buffer in module._buffers.items():
            if buffer is not None:
                if buffer not in copies:
                    copies[buffer] = buffer.detach().to(stage.device, copy=True)
                writes.append((module._buffers, name, copies[buffer]))
    with stage.journal.changed(writes), current(stage.device):
        try:
            yield
        except Exception as error:
            names = ", ".join(title for _, title in stage.titled) or str(stage.partition)
            add_note(
                error,
                f"raised in {names}, which ran by itself on a micro-batch of {rows} rows, on "
                f"{stage.device}, to measure what it costs. Pass an input that the model takes, or "
                "choose a balance that needs no measurement: a list, or 'parameters'.",
            )
            raise


def gradients_for(outputs: FlatTree) -> FlatTree:
    """Return a gradient for each output that requires one."""
    gradients = [torch.ones_like(x) if requires_grad(x) else None for x in outputs.leaves]
    return FlatTree(gradients, outputs.spec)


def tensors_in(stage: Stage) -> Iterator[Tensor]:
    """Yield the parameters and buffers that a stage has now."""
    for layer in stage.partition.layers:
        yield from (*layer.parameters(), *layer.buffers())


class Flow:
    """A micro-batch on its way through the stages of a program, on a device."""

    def __init__(self, microbatch: Any, program: Program, device: torch.device) -> None:
        self._device = device
        self._by_route: dict[tuple[RouteName, int], FlatTree] = {}
        inputs = [microbatch] if len(program.inputs) == 1 else microbatch
        trees = (tree_flatten(change_tensors(value, self._copied)) for value in inputs)
        values = dict(zip(program.inputs, trees, strict=True))
        self._main = join([values[number] for number in program.first])
        for route in program.given:
            tree = join([values[number] for number in route.numbers])
            self._by_route[route.name, route.target] = tree

    def arriving(self, j: int, routes: Sequence[Route]) -> FlatTree:
        return join([self._main, *(self._by_route.pop((route.name, j)) for route in routes)])

    def leave(self, outputs: FlatTree, routes: Sequence[Route]) -> None:
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
        return sum(map(_bytes, (self._main, *self._by_route.values())))

    @property
    def leaves(self) -> Iterator[Any]:
        for tree in (self._main, *self._by_route.values()):
            yield from tree.leaves

    def _copied(self, x: Tensor) -> Tensor:
        return x.detach().to(self._device, copy=True).requires_grad_(x.requires_grad)


def _bytes(tree: FlatTree) -> int:
    return sum(bytes_of(leaf) for leaf in tree.leaves if isinstance(leaf, Tensor))
