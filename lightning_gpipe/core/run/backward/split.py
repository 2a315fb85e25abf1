"""The split of a backward: the gradients of the inputs first, those of the weights later.

Another stage waits for the gradients of a stage's inputs; for those of its weights nobody waits
before the optimizer. Autograd computes both operator by operator. Asked for the gradients of the
inputs only, an operator such as a linear layer leaves out the other half. The missing part begins
at such operators, each of which has weights on one side and the way to the inputs on the other::

                          weights          weights
                             |                |
         inputs <------- operator <------ operator <------ outputs

An edge from an operator towards the weights is called an exit here. W runs such operators a second
time, with the gradients that entered them, and asks for those of their exits only: nothing is
computed twice. From the exits, backward goes on to the weights as it always does.

B computes the gradients of weights behind exits that several operators share, such as a bias that
is used twice, and behind operators that compute all gradients at once: those written in Python,
compiled ones among them. The split follows from the shape of the graph, and is searched for once
for each shape. Source: Qi et al., "Zero Bubble Pipeline Parallelism" (2023), for B and W.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from lightning_gpipe.core.faithful import record
from lightning_gpipe.core.run.backward.roots import Edge, Graph, is_leaf, saved_by

# PyTorch makes a class of the first name for each compiled function.
_WHOLE = frozenset({"CompiledFunctionBackward", "CheckpointFunctionBackward"})


class Operator(NamedTuple):
    """An operator that W runs again; each of its exits has a place among all edges."""

    node: int
    exits: tuple[tuple[int, Edge], ...]


class GraphPart(NamedTuple):
    """A backward of W: the operators that share nodes on the way to the weights."""

    operators: tuple[Operator, ...]
    roots: tuple[int, ...]  # the indices of outputs that depend on nothing but weights


class Split(NamedTuple):
    """The split of a backward into B and W."""

    roots: tuple[int, ...]  # the indices of the outputs from which B starts
    leaves: tuple[Edge, ...]  # to which B goes: the inputs, and some weights
    parts: tuple[GraphPart, ...]  # the backwards of W
    freed: tuple[tuple[int, tuple[str, ...]], ...]  # by node, saved tensors that W needs not


class Splits:
    """A cache of splits by the shapes of graphs, which drops the oldest."""

    def __init__(self) -> None:
        self._by_shape: dict[Any, Split | None] = {}

    def of(self, graph: Graph) -> Split | None:
        """Return the split of a graph; None if B computes all of it."""
        if graph.shape not in self._by_shape:
            record(self._by_shape, graph.shape, find_split(graph))
        return self._by_shape[graph.shape]


def find_split(graph: Graph) -> Split | None:
    """Find the split of a graph; None if there is nothing that W could compute.

    Compiled functions have none: they may reuse the memory of their saved tensors, and then refuse
    a backward that keeps the graph. Reentrant checkpoints refuse a backward to some leaves only.
    """
    if any(type(node).__name__ in _WHOLE for node in graph.nodes):
        return None
    split = _Search(graph).split()
    return split if split.parts else None


class _Search:
    """The search for the split of one graph. Sets of nodes are the bits of integers."""

    def __init__(self, graph: Graph) -> None:
        self._nodes, self._roots = graph.nodes, graph.roots
        index = {node: k for k, node in enumerate(graph.nodes)}
        # The edges of each node's gradients; None for gradients that go nowhere.
        self._edges: list[list[Edge | None]] = [
            [None if child is None else (index[child], nr) for child, nr in node.next_functions]
            for node in graph.nodes
        ]
        self._children = [[e[0] for e in edges if e is not None] for edges in self._edges]
        self._leaves = {k for k, node in enumerate(self._nodes) if is_leaf(node)}
        self._behind = self._find_behind()
        inputs, weights = _set(graph.inputs), _set(self._leaves - {*graph.inputs})
        self._to_inputs = [k for k, behind in enumerate(self._behind) if behind & inputs]
        self._inner = {*self._to_inputs}
        # Nodes that lead to weights and not to inputs, with the operators that lead there.
        self._exits: dict[int, set[int]] = {
            k: set() for k, _ in self._roots if k not in self._inner and self._behind[k] & weights
        }
        for operator in self._to_inputs:
            for k in self._children[operator]:
                if k not in self._inner and self._behind[k] & weights:
                    self._exits.setdefault(k, set()).add(operator)

    def split(self) -> Split:
        early = self._find_early()
        late = {k for k in self._exits if not self._behind[k] & early}
        start = [r for r, (k, _) in enumerate(self._roots) if k not in late]
        leaves = [k for k in sorted(self._leaves) if k in self._inner or early >> k & 1]
        parts = tuple(self._parts(late))
        again = {each.node for part in parts for each in part.operators}
        inner = ((k, saved_by(self._nodes[k])) for k in self._to_inputs if k not in again)
        freed = tuple((k, names) for k, names in inner if names)
        return Split(tuple(start), tuple((k, 0) for k in leaves), parts, freed)

    def _find_behind(self) -> list[int]:
        """Return the set of nodes that backward through each node reaches, itself included."""
        behind = [0] * len(self._nodes)
        waiting = [(k, False) for k, _ in self._roots]
        while waiting:
            k, done = waiting.pop()
            if done:
                behind[k] = 1 << k
                for child in self._children[k]:
                    behind[k] |= behind[child]
            elif not behind[k]:
                waiting.append((k, True))
                waiting += [(child, False) for child in self._children[k] if not behind[child]]
        return behind

    def _find_early(self) -> int:
        """Return the nodes behind the exits whose gradients B computes."""
        early = 0
        for k, operators in self._exits.items():
            if len(operators) > 1 or any(map(self._computes_all, operators)):
                early |= self._behind[k]
        before = -1
        while before != early:  # and those that meet these
            before = early
            for k in self._exits:
                if self._behind[k] & early:
                    early |= self._behind[k]
        return early

    def _computes_all(self, operator: int) -> bool:
        """Return True if an operator computes all gradients at once, or must not run again."""
        node = self._nodes[operator]
        if isinstance(node, torch._C._FunctionBase):
            return True
        # Hooks on its saved tensors, such as those of checkpointing, may compute them anew.
        saved = (tensor for name in saved_by(node) for tensor in saved_tensors(node, name))
        return any(getattr(tensor, "unpack_hook", None) is not None for tensor in saved)

    def _parts(self, late: set[int]) -> Iterator[GraphPart]:
        inner = ~_set(self._leaves)
        groups: list[tuple[int, list[int]]] = []  # nodes, and the exits from which they are reached
        for k in sorted(late):
            # Several exits of an operator are computed at once, so they belong together.
            nodes = self._behind[k] & inner | _set(self._exits[k])
            members = [k]
            for group in [each for each in groups if each[0] & nodes]:
                groups.remove(group)
                nodes, members = nodes | group[0], group[1] + members
            groups.append((nodes, members))
        for _, members in groups:
            operators = sorted({operator for k in members for operator in self._exits[k]})
            roots = [r for r, (k, _) in enumerate(self._roots) if k in members]
            yield GraphPart(tuple(self._operator(k, members) for k in operators), tuple(roots))

    def _operator(self, node: int, members: Sequence[int]) -> Operator:
        edges = enumerate(self._edges[node])
        return Operator(node, tuple((p, e) for p, e in edges if e is not None and e[0] in members))


def saved_tensors(node: Any, name: str) -> Sequence[Any]:
    """Return the tensor or tensors that a node has saved under a name, packed."""
    saved = getattr(node, name)
    return saved if isinstance(saved, tuple | list) else (saved,)


def unpacked(node: Any, name: str) -> Sequence[Any]:
    """Return the same as tensors, in the same memory; None where it has saved none."""
    return saved_tensors(node, name.replace("_raw_saved", "_saved", 1))


def _set(elements: Iterable[int]) -> int:
    bits = 0
    for k in elements:
        bits |= 1 << k
    return bits
