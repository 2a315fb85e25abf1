"""The units that a balance counts, and the steps that belong to each.

A unit is one call of a layer. A module that runs several times cannot be on two stages, so all
calls from its first to its last are one unit, unless it has no state: the one ``nn.ReLU`` of a
residual network may run on every stage.

A step between two calls belongs to the earlier one, but from where the forward enters the module
that makes the later one::

    stem.conv        a unit
    stem.relu        a unit
    +                with stem.relu
    block: pool      with block.conv: it runs in the forward of block
    block.conv       a unit
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import fx, nn

from lightning_gpipe.core.frontends.traced.call_graph import CallGraph


class Unit(NamedTuple):
    """Calls that stay on one stage.

    Attributes:
        name: The name of the first module that is called.
        nodes: The steps, those between the calls included.
        calls: The calls.
    """

    name: str
    nodes: tuple[fx.Node, ...]
    calls: tuple[fx.Node, ...]


def units_of(graph: CallGraph) -> list[Unit]:
    """Return the units of a graph, in order."""
    calls = graph.calls
    steps = [[] for _ in calls]  # type: list[list[fx.Node]]
    for node, k in zip(graph.nodes, leads(graph), strict=True):
        if calls:
            steps[k].append(node)
    units = []
    for first, end in _runs(graph, calls):
        nodes = tuple(node for k in range(first, end) for node in steps[k])
        units.append(Unit(str(calls[first].target), nodes, tuple(calls[first:end])))
    return units


def leads(graph: CallGraph) -> list[int]:
    """Return, for each step, the index of the call that it belongs to."""
    calls = graph.calls
    indices, k = [], -1  # the latest call
    for node in graph.nodes:
        following = calls[k + 1] if k + 1 < len(calls) else None
        if node is following:
            k += 1
            indices.append(k)
        elif following is not None and _enters(node, following, calls[k] if k >= 0 else None):
            indices.append(k + 1)
        else:
            indices.append(max(k, 0))
    return indices


def is_stateless(module: nn.Module) -> bool:
    """Return whether a module holds nothing that a forward could change."""
    if any(True for _ in (*module.parameters(), *module.buffers(), *module.children())):
        return False
    values = (value for name, value in vars(module).items() if not name.startswith("_"))
    return all(isinstance(value, _ATOMS) or _is_tuple_of_atoms(value) for value in values)


_ATOMS = (bool, int, float, str, type(None))


def _is_tuple_of_atoms(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(item, _ATOMS) for item in value)


def _enters(node: fx.Node, following: fx.Node, latest: fx.Node | None) -> bool:
    """Return whether a step runs in a module that makes the following call, not the latest."""
    if latest is None:
        return True
    shared = set(node.meta["within"]) & set(following.meta["within"])
    return bool(shared - set(latest.meta["within"]))


def _runs(graph: CallGraph, calls: Sequence[fx.Node]) -> Iterator[tuple[int, int]]:
    """Yield the first index, and that after the last, of the calls of each unit."""
    last: dict[nn.Module, int] = {graph.layer(node): k for k, node in enumerate(calls)}
    first = end = 0
    for k, node in enumerate(calls):
        if k == end and k > first:
            yield first, end
            first = k
        module = graph.layer(node)
        end = max(end, k + 1, 0 if is_stateless(module) else last[module] + 1)
    if calls:
        yield first, end
