"""Backward through a stage in two parts: B, to its inputs, and W, later, to its weights.

Between B and W the operators that W runs again keep their saved tensors, and the gradients that
entered them. The other saved tensors of the graph are freed after B. Where a backward cannot be
split, or no input requires a gradient, as in the first stage, B is the whole of it.

# Note [An operator runs twice, its hooks once]
A hook on a tensor that a layer computes, such as that of retain_grad(), belongs to the node that
made the tensor, and runs whenever autograd runs the node. So autograd does so in B only. The
gradients that have passed the hooks are recorded there, and W calls the node itself, which leaves
all hooks out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor

from lightning_gpipe.core.data import requires_grad
from lightning_gpipe.core.run.backward.roots import (
    Graph,
    Root,
    asking_for,
    run_backward,
    run_backward_to,
    saved_by,
    with_gradients,
)
from lightning_gpipe.core.run.backward.split import Split, Splits, saved_tensors, unpacked


class SplitBackward:
    """B and W of one micro-batch."""

    def __init__(self, graph: Graph, split: Split, starts: Sequence[tuple[Root, Tensor]]) -> None:
        self._graph, self._split, self._starts = graph, split, starts
        self._entered: dict[int, tuple[Tensor | None, ...]] = {}  # what entered the operators

    @classmethod
    def of(
        cls,
        splits: Splits,
        inputs: Sequence[Any],
        roots: Sequence[Root | None],
        gradients: Sequence[Tensor | None],
    ) -> SplitBackward | None:
        """Split the backward of a graph to ``inputs``; None if B computes all of it."""
        leaves = list(filter(requires_grad, inputs))
        starts = list(zip(*with_gradients(roots, gradients), strict=True))
        if not leaves or not starts or any(_is_leaf(root) for root, _ in starts):
            return None
        graph = Graph.behind([root for root, _ in starts], leaves)
        split = splits.of(graph)
        return None if split is None else cls(graph, split, starts)

    def run_inputs(self) -> None:
        """Run B."""
        graph, split = self._graph, self._split
        for part in split.parts:
            for operator in part.operators:
                record = partial(_record, self._entered, operator.node)
                graph.nodes[operator.node].register_prehook(record)
        if split.roots:
            roots, gradients = zip(*(self._starts[r] for r in split.roots), strict=True)
            run_backward_to([graph.edge(leaf) for leaf in split.leaves], roots, gradients)
        for k, names in split.freed:
            for name in names:
                for saved in saved_tensors(graph.nodes[k], name):
                    _free(saved)

    @property
    def entered(self) -> list[Tensor]:
        """The gradients with which W will begin."""
        entered = chain((gradient for _, gradient in self._starts), *self._entered.values())
        return [gradient for gradient in entered if gradient is not None]

    def kept(self) -> Iterator[Tensor]:
        """Yield the gradients that entered the operators of W, and the operators' saved tensors."""
        for gradients in self._entered.values():
            yield from (gradient for gradient in gradients if gradient is not None)
        for part in self._split.parts:
            for operator in part.operators:
                node = self._graph.nodes[operator.node]
                for name in saved_by(node):
                    saved = unpacked(node, name)
                    yield from (tensor for tensor in saved if isinstance(tensor, Tensor))

    def run_weights(self) -> None:
        """Run W."""
        exits = [
            self._graph.edge(edge)
            for part in self._split.parts
            for operator in part.operators
            for _, edge in operator.exits
        ]
        asking_for(exits, self._run_parts)

    def _run_parts(self) -> None:
        """Run the operators of each part again, and then backward from their exits."""
        for part in self._split.parts:
            roots: list[Root] = [self._starts[r][0] for r in part.roots]
            gradients: list[Tensor | None] = [self._starts[r][1] for r in part.roots]
            for operator in part.operators:
                entered = self._entered.pop(operator.node, None)
                if entered is not None:  # it took part
                    computed = self._graph.nodes[operator.node](*entered)
                    computed = computed if isinstance(computed, tuple) else (computed,)
                    roots += [self._graph.edge(edge) for _, edge in operator.exits]
                    gradients += [computed[place] for place, _ in operator.exits]
            run_backward(roots, gradients)


def _record(
    into: dict[int, tuple[Tensor | None, ...]], node: int, entered: tuple[Tensor | None, ...]
) -> None:
    into[node] = entered


def _is_leaf(root: Root) -> bool:
    return isinstance(root, Tensor) and root.grad_fn is None


def _free(saved: Any) -> None:
    try:
        saved.register_hooks(_nothing, _nothing)
    except RuntimeError:  # it has saved None there, or nothing
        return


def _nothing(_: Any) -> None:
    return None
