"""The stage of each module and of each step.

A layer runs on its stage in every kind of call. The other steps of a graph follow the calls that
they belong to. A read of a part (``x[0]``, ``x.shape``) runs where the value is made, so that only
the part travels.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import fx, nn

from lightning_gpipe.core.frontends.traced.call_graph import CallGraph
from lightning_gpipe.core.frontends.traced.tracer import has_hooks
from lightning_gpipe.core.frontends.traced.units import Unit, is_stateless, leads
from lightning_gpipe.core.frontends.traced.unsupported import UnsupportedForward

_READS = frozenset({"size", "dim", "numel", "ndimension", "is_floating_point", "__len__"})


@dataclass
class Ownership:
    """The stage of each layer.

    Attributes:
        n: The number of stages.
        owners: The stage of each layer that runs on one.
        shared: For each layer that runs on several, the stages of its calls, in order.
    """

    n: int
    owners: dict[nn.Module, int] = field(default_factory=dict)
    shared: dict[nn.Module, list[int]] = field(default_factory=dict)

    @classmethod
    def cut(cls, graph: CallGraph, units: Sequence[Unit], balance: Sequence[int]) -> Ownership:
        """Find the stage of each layer, from the number of units in each stage."""
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
                now = max(now, self.owners.get(layer, now))
            if layer not in self.owners and layer not in self.shared:
                self.owners[layer] = now

    def stages(self, graph: CallGraph) -> dict[fx.Node, int]:
        """Return the stage of each step, except reads of parameters and buffers.

        Raises:
            UnsupportedForward: If a call needs a value of a later stage.
        """
        stages: dict[fx.Node, int] = {}
        calls = self._calls(graph)
        for node, lead in zip(graph.nodes, leads(graph), strict=True):
            if node.op == "get_attr":
                continue
            earliest = max((stages[x] for x in node.all_input_nodes if x in stages), default=0)
            base = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
            if node.op == "call_module" and graph.layer(node) in self.owners:
                stages[node] = self.owners[graph.layer(node)]
                if earliest > stages[node]:
                    raise UnsupportedForward(_backwards(node, stages[node], earliest))
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
        return str(node.target) in _READS
    return node.target in (getattr, operator.getitem)


def _of_no_stage(call: fx.Node, layer: nn.Module) -> str:
    if has_hooks(layer):
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


def _backwards(node: fx.Node, own: int, earliest: int) -> str:
    return (
        f"a forward must run its layers in the same order in every kind of call: {node.target}, "
        f"on stage {own}, is called at {node.meta['line']} with a value of stage {earliest}. "
        "Choose a balance that keeps them on one stage."
    )
