"""The graph behind a stage's outputs, and its shape, which is equal for all micro-batches."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lightning_gpipe.core.run.backward.roots import Root

Edge = tuple[int, int]  # the index of a node, and which of the gradients that enter it

_LEAF = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]  # not in the stubs


class Graph(NamedTuple):
    """The nodes behind some outputs.

    Attributes:
        nodes: Each node once: the outputs' first, every other one after one that leads to it.
        roots: The edges from which backward starts.
        inputs: The nodes of the inputs.
        shape: Equal for graphs of the same nodes, joined alike, that end in the same inputs.
    """

    nodes: Sequence[Any]
    roots: Sequence[Edge]
    inputs: Sequence[int]
    shape: Hashable

    @classmethod
    def behind(cls, roots: Iterable[Root], inputs: Iterable[Any]) -> Graph:
        """Return the graph behind ``roots``, no leaves; about a microsecond for each node."""
        input_ids = {id(leaf) for leaf in inputs if isinstance(leaf, Tensor)}
        starts = [_edge_of(root) for root in roots]
        nodes = list(dict.fromkeys(node for node, _ in starts))
        index = {node: k for k, node in enumerate(nodes)}
        edges = [(index[node], nr) for node, nr in starts]
        shape: list[Any] = list(edges)
        add, reached = shape.append, []
        for position, node in enumerate(nodes):  # the loop appends to them
            kind = type(node)
            add(kind)
            if kind is _LEAF:
                if id(node.variable) in input_ids:
                    add(True)
                    reached.append(position)
                continue
            for child, nr in node.next_functions:
                if child is None:
                    add(None)
                    continue
                k = index.get(child)
                if k is None:
                    k = index[child] = len(nodes)
                    nodes.append(child)
                add(k)
                add(nr)
        return cls(nodes, edges, reached, tuple(shape))

    def edge(self, edge: Edge) -> GradientEdge:
        """Return an edge as autograd has it."""
        k, nr = edge
        return GradientEdge(self.nodes[k], nr)


def is_leaf(node: Any) -> bool:
    """Return whether a node accumulates the gradient of a leaf."""
    return type(node) is _LEAF


def _edge_of(root: Root) -> tuple[Any, int]:
    return root.grad_fn if isinstance(root, Tensor) else root.node, root.output_nr
