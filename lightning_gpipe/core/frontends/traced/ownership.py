"""The units that a balance counts, and the stage of each layer and of each step.

A unit is one call of a layer. A module that runs several times cannot be on two stages, so all
calls from its first to its last are one unit, unless it has no state, as an ``nn.ReLU``. A step
between two calls belongs to the earlier one, but from where the forward enters the module that
makes the later one::

    stem.conv        a unit
    stem.relu        a unit
    +                with stem.relu
    block: pool      with block.conv: it runs in the forward of block
    block.conv       a unit

A layer runs on its stage in every kind of call. A read of a part (``x[0]``, ``x.shape``) runs where
the value is made, so that only the part travels.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from torch import fx, nn

from lightning_gpipe.core.frontends.traced.call_graph import CallGraph, UnsupportedForward
from lightning_gpipe.core.frontends.traced.symbolic import first_input
from lightning_gpipe.core.layout import hooks_of

_READ_METHODS = frozenset({"size", "dim", "numel", "ndimension", "is_floating_point", "__len__"})


class Unit(NamedTuple):
    """Calls that stay on one stage, and the steps with those between them."""

    nodes: Sequence[fx.Node]
    calls: Sequence[fx.Node]


def units_of(graph: CallGraph) -> list[Unit]:
    """Return the units of a graph, in order."""
    calls, of_steps = graph.calls, leads(graph)
    units = []
    for first, end in _runs(graph, calls):
        nodes = [node for node, k in zip(graph.nodes, of_steps, strict=True) if first <= k < end]
        units.append(Unit(nodes, calls[first:end]))
    return units


def leads(graph: CallGraph) -> list[int]:
    """Return, for each step, the index of the call that it belongs to."""
    calls = graph.calls
    indices, k = [], -1  # the latest call
    for node in graph.nodes:
        following = calls[k + 1] if k + 1 < len(calls) else None
        latest = calls[k] if k >= 0 else None
        ahead = following is not None and (node is following or _enters(node, following, latest))
        indices.append(k + 1 if ahead else max(k, 0))
        k += node is following
    return indices


def is_stateless(module: nn.Module) -> bool:
    """Return whether a module holds nothing that a forward could change."""
    if any(True for _ in (*module.parameters(), *module.buffers(), *module.children())):
        return False
    values = [value for name, value in vars(module).items() if not name.startswith("_")]
    items = chain.from_iterable(x if isinstance(x, tuple) else [x] for x in values)
    return all(isinstance(item, bool | int | float | str | None) for item in items)


def _enters(node: fx.Node, following: fx.Node, latest: fx.Node | None) -> bool:
    """Return whether a step runs in a module that makes the following call, not the latest one."""
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


@dataclass
class Ownership:
    """The stage of each layer; of ``shared`` ones, on several stages, those of their calls."""

    n: int
    owners: dict[nn.Module, int] = field(default_factory=dict)
    shared: dict[nn.Module, list[int]] = field(default_factory=dict)

    @classmethod
    def cut(cls, graph: CallGraph, units: Sequence[Unit], balance: Sequence[int]) -> Ownership:
        own = cls(len(balance))
        stages = (j for j, size in enumerate(balance) for _ in range(size))
        calls: dict[nn.Module, list[int]] = {}
        for unit, j in zip(units, stages, strict=True):
            for call in unit.calls:
                calls.setdefault(graph.layer(call), []).append(j)
        for layer, of_calls in calls.items():
            if len(set(of_calls)) == 1 or not is_stateless(layer):
                own.owners[layer] = of_calls[0]
            else:
                own.shared[layer] = of_calls
        return own

    def extend(self, graph: CallGraph) -> None:
        """Add layers that run only in ``graph`` to the stage of the call before them."""
        now = 0
        for call in graph.calls:
            layer = graph.layer(call)
            if layer not in self.shared:
                now = max(now, self.owners.setdefault(layer, now))

    def stages(self, graph: CallGraph) -> dict[fx.Node, int]:
        stages: dict[fx.Node, int] = {}
        calls = self._calls(graph)
        for node, lead in zip(graph.nodes, leads(graph), strict=True):
            if node.op == "get_attr":
                continue
            earliest = max((stages[x] for x in node.all_input_nodes if x in stages), default=0)
            base = first_input(node)
            if node.op == "call_module" and graph.layer(node) in self.owners:
                stages[node] = self.owners[graph.layer(node)]
                if earliest > stages[node]:
                    raise UnsupportedForward(
                        "a forward must run its layers in the same order in every kind of call: "
                        f"{node.target}, on stage {stages[node]}, is called at {node.meta['line']} "
                        f"with a value of stage {earliest}. Choose a balance that keeps them on "
                        "one stage."
                    )
            elif base in stages and _is_read(node) and earliest == stages[base]:
                stages[node] = earliest
            else:
                stages[node] = max(earliest, calls[lead] if calls else 0)
        return stages

    def _calls(self, graph: CallGraph) -> list[int]:
        stages, now = [], 0
        places: dict[nn.Module, Iterator[int]] = {k: iter(v) for k, v in self.shared.items()}
        for call in graph.calls:
            layer = graph.layer(call)
            if layer in self.owners:
                j = self.owners[layer]
            elif not is_stateless(layer):
                raise UnsupportedForward(_of_no_stage(call, layer))
            else:
                j = max(now, next(places[layer], now) if layer in places else now)
            now = max(now, j)
            stages.append(j)
        return stages


def _is_read(node: fx.Node) -> bool:
    if node.op == "call_method":
        return str(node.target) in _READ_METHODS
    return node.target in (getattr, operator.getitem)


def _of_no_stage(call: fx.Node, layer: nn.Module) -> str:
    if any(hooks_of(layer)):
        return (
            f"a module with hooks must be on one stage, so that the hooks run with it: "
            f"{call.target} is on several. Register them on modules in it, or on the whole model, "
            "or choose a balance that keeps it on one stage."
        )
    return (
        f"the layers of a pipeline must stay the same objects: {call.target}, called at "
        f"{call.meta['line']}, is another {type(layer).__name__} now, or was no layer when the "
        "model was cut. Replace layers before setup."
    )
