"""Where a backward can be split: the gradients of the inputs first, those of the weights later.

Another stage waits for the gradients of a stage's inputs; for those of its weights nobody waits
before the optimizer. Autograd computes both in one go, operator by operator. But it can be asked
for the gradients of the inputs only, and then an operator such as a linear layer leaves out the
other half. What is missing at the end begins at such operators, each of which has weights on one
side and the way to the inputs on the other::

                          weights          weights
                             |                |
         inputs <------- operator <------ operator <------ outputs

An edge from an operator towards the weights is called an exit here. W runs such operators a second
time, with the gradients that entered them, and asks for those of their exits only: nothing is
computed twice. From the exits, backward goes on to the weights as it always does.

Exits that several operators share, such as a bias that is used twice, get the sum of what these
compute; and some operators compute all gradients at once: those that are written in Python,
compiled ones among them. The gradients of these weights are computed in B. So are those of weights
that have another way to such an exit.

The split is a value that follows from the shape of the graph. It is found once for each shape.

Source: Qi et al., "Zero Bubble Pipeline Parallelism" (2023), for B and W.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from lightning_gpipe.core.run.graphs import Edge, Graph, children_of, is_leaf

_COMPILED = "CompiledFunctionBackward"  # PyTorch makes a class of this name for each


class Operator(NamedTuple):
    """An operator that W runs again.

    Attributes:
        node: Its node.
        exits: Those of its edges whose gradients are asked for, each with its place among all.
    """

    node: int
    exits: tuple[tuple[int, Edge], ...]


class Part(NamedTuple):
    """What W computes in one backward: what shares nodes on the way to the weights.

    Attributes:
        operators: The operators.
        roots: Which of the outputs depend on nothing but weights.
    """

    operators: tuple[Operator, ...]
    roots: tuple[int, ...]


class Split(NamedTuple):
    """How to split a backward.

    Attributes:
        roots: Which of the outputs B starts from.
        leaves: The leaves to which it goes: the inputs, and some weights.
        parts: What W computes.
        freed: The nodes whose saved tensors W does not need, with the names of these.
    """

    roots: tuple[int, ...]
    leaves: tuple[Edge, ...]
    parts: tuple[Part, ...]
    freed: tuple[tuple[int, tuple[str, ...]], ...]


class Splits:
    """The splits that were found, by the shapes of graphs; the least recently used are dropped."""

    _MOST = 64

    def __init__(self) -> None:
        self._found: OrderedDict[Any, Split | None] = OrderedDict()

    def of(self, graph: Graph) -> Split | None:
        """The split of a graph; None if all is better computed at once."""
        if graph.shape not in self._found:
            self._found[graph.shape] = find_split(graph)
            if len(self._found) > self._MOST:
                self._found.popitem(last=False)
        self._found.move_to_end(graph.shape)
        return self._found[graph.shape]

    def __reduce__(self) -> tuple[type[Splits], tuple[()]]:
        return Splits, ()  # a copy finds its own: classes of autograd cannot be pickled


def find_split(graph: Graph) -> Split | None:
    """Find the split of a graph; None if there is nothing that W could compute.

    Nor is there one behind a compiled function: it may reuse the memory of what it has saved, and
    then refuses a backward that keeps the graph.
    """
    if any(type(node).__name__ == _COMPILED for node in graph.nodes):
        return None
    found = _Search(graph).split()
    return found if found.parts else None


class _Search:
    """The search for the split of one graph. Sets of nodes are the bits of integers."""

    def __init__(self, graph: Graph) -> None:
        self._nodes, self._roots = graph.nodes, graph.roots
        self._edges = children_of(graph.nodes)
        self._children = [[e[0] for e in edges if e is not None] for edges in self._edges]
        self._leaves = {k for k, node in enumerate(self._nodes) if is_leaf(node)}
        self._behind = self._find_behind()
        inputs, weights = _set(graph.inputs), _set(self._leaves - {*graph.inputs})
        self._to_inputs = [k for k, behind in enumerate(self._behind) if behind & inputs]
        self._inner = {*self._to_inputs}
        # What leads to weights and not to inputs, with the operators that lead there.
        self._exits: dict[int, set[int]] = {
            k: set() for k, _ in self._roots if k not in self._inner and self._behind[k] & weights
        }
        for operator in self._to_inputs:
            for k in self._children[operator]:
                if k not in self._inner and self._behind[k] & weights:
                    self._exits.setdefault(k, set()).add(operator)

    def split(self) -> Split:
        """The split, which may have no parts."""
        early = self._find_early()
        late = {k for k in self._exits if not self._behind[k] & early}
        start = [r for r, (k, _) in enumerate(self._roots) if k not in late]
        leaves = [k for k in sorted(self._leaves) if k in self._inner or early >> k & 1]
        parts = tuple(self._parts(late))
        again = {each.node for part in parts for each in part.operators}
        freed = tuple(self._freed(again))
        return Split(tuple(start), tuple((k, 0) for k in leaves), parts, freed)

    def _find_behind(self) -> list[int]:
        """For each node, what backward through it reaches, itself included."""
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
        """The nodes behind those exits whose gradients B computes."""
        early = 0
        for k, operators in self._exits.items():
            if len(operators) > 1 or any(map(self._computes_all, operators)):
                early |= self._behind[k]
        found = -1
        while found != early:  # and those that meet these
            found = early
            for k in self._exits:
                if self._behind[k] & early:
                    early |= self._behind[k]
        return early

    def _computes_all(self, operator: int) -> bool:
        """Whether an operator computes all gradients at once, or must not run again."""
        node = self._nodes[operator]
        if isinstance(node, torch._C._FunctionBase):
            return True
        # Hooks on what it has saved, such as those of checkpointing, may compute that anew.
        saved = (each for name in saved_by(node) for each in saved_tensors(node, name))
        return any(getattr(each, "unpack_hook", None) is not None for each in saved)

    def _parts(self, late: set[int]) -> Iterator[Part]:
        """The parts, from those next to the outputs on."""
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
            yield Part(tuple(self._operator(k, members) for k in operators), tuple(roots))

    def _operator(self, node: int, members: Sequence[int]) -> Operator:
        edges = enumerate(self._edges[node])
        return Operator(node, tuple((p, e) for p, e in edges if e is not None and e[0] in members))

    def _freed(self, again: set[int]) -> Iterator[tuple[int, tuple[str, ...]]]:
        """The nodes whose saved tensors W does not need, with the names of these."""
        for k in self._to_inputs:
            if k not in again and (names := saved_by(self._nodes[k])):
                yield k, names


def saved_by(node: Any) -> tuple[str, ...]:
    """The names under which a node has saved tensors."""
    return tuple(name for name in dir(node) if name.startswith("_raw_saved"))


def saved_tensors(node: Any, name: str) -> Sequence[Any]:
    """What a node has saved under a name: one tensor, or several."""
    found = getattr(node, name)
    return found if isinstance(found, tuple | list) else (found,)


def unpacked(node: Any, name: str) -> Sequence[Any]:
    """The same as tensors, in the same memory; None where it has saved none."""
    found = getattr(node, name.replace("_raw_saved", "_saved", 1))
    return found if isinstance(found, tuple | list) else (found,)


def _set(elements: Iterable[int]) -> int:
    found = 0
    for k in elements:
        found |= 1 << k
    return found
