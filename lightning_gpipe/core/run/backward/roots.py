"""The roots of a backward through a stage, its run, and the graph behind them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

Root = GradientEdge | Tensor
Edge = tuple[int, int]  # the index of a node, and which of the gradients that enter it

REENTRANT = "CheckpointFunctionBackward"  # runs backward itself, which accumulates gradients
_FEW = 12  # nodes of a graph: to look at more takes as long as a call of autograd
_LEAF = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]  # not in the stubs

# Of a tuple, at once: one is made for each micro-batch on each stage.
_edge: Callable[[tuple[Any, int]], GradientEdge] = partial(tuple.__new__, GradientEdge)


def root_of(leaf: Any) -> Root | None:
    """Return the root of an output's backward: an edge of the graph, which keeps no tensor alive.

    The root is the output itself if that is sparse, which has no view to find the edge of a leaf
    by, or nested, because a gradient must have the very offsets of a jagged one.
    """
    if not isinstance(leaf, Tensor) or not leaf.requires_grad:
        return None
    if leaf.layout is not torch.strided or leaf.is_nested:
        return leaf
    node = leaf.grad_fn
    if node is None:
        return get_gradient_edge(leaf)
    # Before torch 2.9 backward cannot start at the edge of a node that is written in Python.
    written_in_python = isinstance(node, torch._C._FunctionBase)
    return leaf if written_in_python else _edge((node, leaf.output_nr))


def roots_of(leaves: Iterable[Any]) -> list[Root | None]:
    """Return the roots of the backward of some outputs; empty if none requires a gradient."""
    roots, needed = [], False
    for leaf in leaves:
        root = root_of(leaf)
        roots.append(root)
        needed = needed or root is not None
    return roots if needed else []


def run_backward(roots: Sequence[Root | None], gradients: Sequence[Tensor | None]) -> None:
    """Run backward from roots with a gradient, without the slow checks of ``torch.autograd``."""
    starts, values = with_gradients(roots, gradients)
    if starts:
        _engine_run_backward(
            starts, values, False, False, (), allow_unreachable=True, accumulate_grad=True
        )


def gradients_of(
    leaves: Sequence[Tensor],
    roots: Sequence[Root | None],
    gradients: Sequence[Tensor | None],
    *,
    keep: bool = True,
) -> list[Tensor | None]:
    """Run backward, and return the gradients of ``leaves`` instead of accumulating them."""
    starts, values = with_gradients(roots, gradients)
    if not starts or not leaves:
        return [None] * len(leaves)
    return list(run_backward_to(leaves, starts, values, keep=keep, accumulate=False))


def asking_for(edges: Sequence[GradientEdge], compute: Callable[[], None]) -> None:
    """Call ``compute``; a node called in it computes the gradients of ``edges`` only.

    Autograd tells a node which gradients the present backward needs: ``compute`` runs in one.
    """
    leaf = torch.zeros((), device="cpu", requires_grad=True)
    leaf.register_hook(lambda _: compute())
    edge, gradient = get_gradient_edge(leaf), torch.zeros((), device="cpu")
    run_backward_to((edge, *edges), (edge,), (gradient,), keep=False, accumulate=False)


def run_backward_to(
    leaves: Sequence[Root],
    roots: Sequence[Root],
    gradients: Sequence[Tensor],
    *,
    keep: bool = True,
    accumulate: bool = True,
) -> Sequence[Tensor | None]:
    """Run backward to some leaves only, and accumulate their gradients or return them."""
    results: Sequence[Tensor | None] = _engine_run_backward(
        tuple(roots),
        tuple(gradients),
        keep,
        False,
        tuple(leaves),
        allow_unreachable=True,
        accumulate_grad=accumulate,
    )
    return results


def leaves_behind(roots: Iterable[Root | None], *, until: Collection[Any] = ()) -> list[Tensor]:
    """Return the leaves that backward from ``roots`` would reach if it ended at ``until``."""
    return graph_behind(roots, until=until)[0]


# The time by which autograd orders the nodes that the calling thread makes.
now: Callable[[], int] = torch._C._autograd._get_sequence_nr


def revisits(roots: Iterable[Root | None], since: int) -> bool:
    """Return True if backward from ``roots`` needs tensors saved before a time of :func:`now`.

    Nodes without saved tensors do not count, such as those of weights that autocast has cast.
    """
    return any_saved_before(graph_behind(roots)[1], since)


def any_saved_before(nodes: Iterable[Any], since: int) -> bool:
    """Return True if one of these nodes saved tensors before a time of :func:`now`."""
    return any(node._sequence_nr() < since and saved_by(node) for node in nodes)


def small_and_apart(graphs: Iterable[tuple[Sequence[Root | None], Sequence[Any]]]) -> bool:
    """Return True if one backward of all these graphs is faster than one of each, and the same.

    Each has its roots and its inputs. Sums are the same to the bit if no node is in two graphs, and
    no leaf but an input has several gradients in one, for each is added to those of other graphs.
    Of a large graph that is not found out.
    """
    all_nodes: set[Any] = set()
    for roots, inputs in graphs:
        nodes = _few_nodes(roots, inputs)
        if nodes is None or not all_nodes.isdisjoint(nodes):
            return False
        all_nodes.update(nodes)
    return True


def _few_nodes(roots: Sequence[Root | None], inputs: Sequence[Any]) -> Collection[Any] | None:
    """Return the inner nodes of a graph; None if they are many, or a leaf has two gradients.

    None, too, if one is written in Python: it may run a backward of its own, such as a checkpoint.
    """
    nodes: dict[Any, None] = {}
    ends: set[Any] = set()
    ways = [_edge_of(root)[0] for root in roots if root is not None]
    for node in ways:  # the loop appends to them
        if node is None or node in nodes:
            continue
        if type(node) is _LEAF:
            if node in ends and all(node.variable is not leaf for leaf in inputs):
                return None
            ends.add(node)
            continue
        if len(nodes) == _FEW or isinstance(node, torch._C._FunctionBase):
            return None
        nodes[node] = None
        for after, _ in node.next_functions:
            ways.append(after)
    return nodes


def saved_by(node: Any) -> tuple[str, ...]:
    """The names under which a node has saved tensors."""
    return tuple(name for name in dir(node) if name.startswith("_raw_saved"))


def graph_behind(
    roots: Iterable[Root | None], *, until: Collection[Any] = ()
) -> tuple[list[Tensor], list[Any]]:
    """Return the leaves and the nodes behind ``roots``, without those behind ``until`` alone.

    Equal graphs have them in one order: processes that share layers compute gradients together.
    """
    leaves: list[Tensor] = []
    nodes: list[Any] = []
    waiting: list[Any] = []
    for root in roots:
        if isinstance(root, Tensor) and root.grad_fn is None:
            leaves.append(root)
        elif root is not None:
            waiting.append(root.grad_fn if isinstance(root, Tensor) else root.node)
    seen = {*waiting, *until}
    # An output may be there twice.
    waiting = [node for node in dict.fromkeys(waiting) if node not in until]
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        else:
            nodes.append(node)
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                waiting.append(after)
    return list(dict.fromkeys(leaves)), nodes


def with_gradients(
    roots: Sequence[Root | None], gradients: Sequence[Tensor | None]
) -> tuple[tuple[Root, ...], tuple[Tensor, ...]]:
    """Return the roots that have a gradient, and the gradients."""
    starts, values = [], []
    for root, gradient in zip(roots, gradients, strict=True):
        if root is not None and gradient is not None:
            starts.append(root)
            values.append(_shaped_as(root, gradient) if isinstance(root, Tensor) else gradient)
    return tuple(starts), tuple(values)


def _shaped_as(output: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient of an output, with the output's own offsets if both are jagged.

    A recomputed output has equal offsets in another tensor, which PyTorch takes for another shape.
    """
    if output.layout is not torch.jagged or gradient.layout is not torch.jagged:
        return gradient
    if gradient.shape == output.shape:
        return gradient
    jagged: Any = output  # only these have offsets
    return torch.nested.nested_tensor_from_jagged(
        gradient.values(), jagged.offsets(), jagged.lengths()
    )


class Graph(NamedTuple):
    """The nodes behind some outputs."""

    nodes: Sequence[Any]  # each once: the outputs' first, every other after one that leads to it
    roots: Sequence[Edge]  # from which backward starts
    inputs: Sequence[int]  # the nodes of the inputs
    shape: Hashable  # equal for graphs of the same nodes, joined alike, with the same inputs

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
        k, nr = edge
        return GradientEdge(self.nodes[k], nr)


def is_leaf(node: Any) -> bool:
    """Return True if a node accumulates the gradient of a leaf."""
    return type(node) is _LEAF


def _edge_of(root: Root) -> tuple[Any, int]:
    return root.grad_fn if isinstance(root, Tensor) else root.node, root.output_nr
