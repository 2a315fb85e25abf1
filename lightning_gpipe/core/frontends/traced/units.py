"""The line of calls that a balance counts, and where the steps between them belong.

A unit is one call of a layer. A module that runs several times cannot be on two stages, so all
calls from its first to its last are one unit, unless it has no state: the one ``nn.ReLU`` of a
residual network may run on every stage.

What runs between two calls belongs to the earlier one, but from where the forward enters the
module that makes the later one::

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

from lightning_gpipe.core.frontends.traced.graph import Graph
from lightning_gpipe.core.plan import contents


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


def units_of(graph: Graph) -> list[Unit]:
    """The units of a graph, in order."""
    calls = graph.calls
    after = [[] for _ in calls]  # type: list[list[fx.Node]]
    for node, k in zip(graph.nodes, leads(graph), strict=True):
        if calls:
            after[k].append(node)
    found = []
    for first, end in _runs(graph, calls):
        nodes = tuple(node for k in range(first, end) for node in after[k])
        found.append(Unit(str(calls[first].target), nodes, tuple(calls[first:end])))
    return found


def leads(graph: Graph) -> list[int]:
    """For each step, the index of the call that it belongs to."""
    calls = graph.calls
    found, k = [], -1  # the latest call
    for node in graph.nodes:
        following = calls[k + 1] if k + 1 < len(calls) else None
        if node is following:
            k += 1
            found.append(k)
        elif following is not None and _entered(node, following, calls[k] if k >= 0 else None):
            found.append(k + 1)
        else:
            found.append(max(k, 0))
    return found


def is_stateless(module: nn.Module) -> bool:
    """Whether a module may run on several stages: it holds nothing that a forward could change."""
    held = (*module.parameters(), *module.buffers(), *module.children())
    slots = {k: v for k, v in vars(module).items() if not k.startswith("_")}
    return not held and all(isinstance(value, _ATOMS) or _atoms(value) for value in slots.values())


_ATOMS = (bool, int, float, str, type(None))


def _atoms(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(each, _ATOMS) for each in contents(value))


def _entered(node: fx.Node, following: fx.Node, latest: fx.Node | None) -> bool:
    """Whether a step runs in a module's forward that makes the following call, not the latest."""
    before = set(latest.meta["within"]) if latest is not None else set()
    return latest is None or bool((_within(node) & _within(following)) - before)


def _within(node: fx.Node) -> set[tuple[int, str]]:
    return set(node.meta["within"])


def _runs(graph: Graph, calls: Sequence[fx.Node]) -> Iterator[tuple[int, int]]:
    """The first index, and that after the last, of the calls of each unit."""
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
