"""Backward through a stage in two parts: B, to its inputs, and W, later, to its weights.

A :class:`~lightning_gpipe.core.run.split.Split` says what is computed when; this runs it. Between B
and W the graph is kept, for the operators that W runs again, with the gradients that entered them.
What else the graph has saved is freed after B.

Where a backward cannot be split, B is the whole of it, and W does nothing; so it is where no input
requires a gradient, as in the first stage, for nobody waits for B there.

# Note [An operator runs twice, its hooks once]
A hook on a tensor that a layer computes, such as that of retain_grad(), belongs to the node that
made the tensor, and runs whenever autograd runs the node. So autograd does so in B only. What has
passed the hooks is recorded there, and W calls the node itself, which leaves all hooks out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from lightning_gpipe.core.data import requires_grad
from lightning_gpipe.core.run.graphs import Graph
from lightning_gpipe.core.run.roots import (
    Root,
    asking_for,
    run_backward,
    run_backward_to,
    with_gradients,
)
from lightning_gpipe.core.run.split import (
    Part,
    Split,
    Splits,
    saved_by,
    saved_tensors,
    unpacked,
)

Gradients = Sequence[Tensor | None]


class Weights:
    """What is left to do for the weights of one pass through a stage, by micro-batch.

    Args:
        splits: Those that were found for the stage.
    """

    def __init__(self, splits: Splits) -> None:
        self._splits = splits
        self._left: dict[int, _Left] = {}

    def run_backward(
        self, i: int, inputs: Sequence[Any], roots: Sequence[Root | None], gradients: Gradients
    ) -> None:
        """Run B of micro-batch ``i``: accumulate the gradients of the inputs.

        Args:
            i: The micro-batch.
            inputs: The stage's inputs.
            roots: Where backward starts.
            gradients: Those of the roots.
        """
        leaves = list(filter(requires_grad, inputs))
        given = list(zip(*with_gradients(roots, gradients), strict=True))
        if leaves and given and all(map(_can_be_split, given)):
            graph = Graph.behind([root for root, _ in given], leaves)
            if (split := self._splits.of(graph)) is not None:
                self._left[i] = left = _Left(graph, split, given)
                left.run_backward()
                return
        run_backward(roots, gradients)

    def run(self, i: int) -> None:
        """Run W of micro-batch ``i``: accumulate the gradients of the weights that B has left."""
        left = self._left.pop(i, None)
        if left is not None:
            left.run()

    def kept(self, i: int) -> list[Tensor]:
        """What is kept for W of micro-batch ``i``."""
        return list(self._left[i].kept()) if i in self._left else []

    def clear(self) -> None:
        """Forget what is left."""
        self._left.clear()


class _Left:
    """What is left of the backward of one micro-batch."""

    def __init__(self, graph: Graph, split: Split, given: Sequence[tuple[Root, Tensor]]) -> None:
        self._graph, self._split, self._given = graph, split, given
        self._entered: dict[int, tuple[Tensor | None, ...]] = {}  # what entered the operators

    def run_backward(self) -> None:
        """Run B."""
        graph, split, given = self._graph, self._split, self._given
        for part in split.parts:
            for operator in part.operators:
                record = partial(_record, self._entered, operator.node)
                graph.nodes[operator.node].register_prehook(record)
        if split.roots:
            roots, gradients = zip(*(given[r] for r in split.roots), strict=True)
            run_backward_to([graph.edge(leaf) for leaf in split.leaves], roots, gradients)
        for k, names in split.freed:
            for name in names:
                for saved in saved_tensors(graph.nodes[k], name):
                    _free(saved)

    def kept(self) -> Iterator[Tensor]:
        """The gradients that entered the operators of W, and what these have saved."""
        for entered in self._entered.values():
            yield from (each for each in entered if each is not None)
        for part in self._split.parts:
            for operator in part.operators:
                node = self._graph.nodes[operator.node]
                for name in saved_by(node):
                    found = unpacked(node, name)
                    yield from (each for each in found if isinstance(each, Tensor))

    def run(self) -> None:
        """Run W."""
        exits = [
            self._graph.edge(edge)
            for part in self._split.parts
            for operator in part.operators
            for _, edge in operator.exits
        ]
        asking_for(exits, self._run_parts)

    def _run_parts(self) -> None:
        for part in self._split.parts:
            self._run_part(part)

    def _run_part(self, part: Part) -> None:
        """Run the operators of a part again, and then backward from their exits."""
        starts: list[Root] = [self._given[r][0] for r in part.roots]
        found: list[Tensor | None] = [self._given[r][1] for r in part.roots]
        for operator in part.operators:
            entered = self._entered.pop(operator.node, None)  # nothing, if it did not take part
            if entered is not None:
                computed = self._graph.nodes[operator.node](*entered)
                computed = computed if isinstance(computed, tuple) else (computed,)
                starts += [self._graph.edge(edge) for _, edge in operator.exits]
                found += [computed[place] for place, _ in operator.exits]
        run_backward(starts, found)


def _record(
    into: dict[int, tuple[Tensor | None, ...]], node: int, entered: tuple[Tensor | None, ...]
) -> None:
    into[node] = entered


def _can_be_split(given: tuple[Root, Tensor]) -> bool:
    root, _ = given
    return not isinstance(root, Tensor) or root.grad_fn is not None


def _free(saved: Any) -> None:
    """Free a tensor that a node has saved."""
    try:
        saved.register_hooks(_nothing, _nothing)
    except RuntimeError:  # it has saved None there, or nothing
        return


def _nothing(_: Any) -> None:
    return None
