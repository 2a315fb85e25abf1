"""Which stage has which module, and runs which step.

A layer runs on its stage in every kind of call. The other steps of a graph follow the calls that
they belong to. A read of a part (``x[0]``, ``x.shape``) runs where the value is made, so that only
the part travels.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from torch import fx, nn

from lightning_gpipe.core.frontends.traced.graph import Graph
from lightning_gpipe.core.frontends.traced.refused import Refused
from lightning_gpipe.core.frontends.traced.tracer import has_hooks
from lightning_gpipe.core.frontends.traced.units import Unit, is_stateless, leads

_READS = frozenset({"size", "dim", "numel", "ndimension", "is_floating_point", "__len__"})


@dataclass
class Ownership:
    """Which stage has which layer.

    Attributes:
        n: The number of stages.
        owners: The stage of each layer that runs on one.
        shared: For each layer that runs on several, the stages of its calls, in order.
    """

    n: int
    owners: dict[nn.Module, int] = field(default_factory=dict)
    shared: dict[nn.Module, list[int]] = field(default_factory=dict)

    @classmethod
    def cut(cls, graph: Graph, units: Sequence[Unit], balance: Sequence[int]) -> Ownership:
        """The stage of each layer, from the number of units in each stage."""
        own = cls(len(balance))
        ends = list(accumulate(balance))
        for k, unit in enumerate(units):
            j = next(j for j, end in enumerate(ends) if k < end)
            for call in unit.calls:
                own.shared.setdefault(graph.layer(call), []).append(j)
        own._settle()
        return own

    def extend(self, graph: Graph) -> None:
        """Let layers that run only in ``graph`` belong to the stage of the call before them."""
        now = 0
        for call in graph.calls:
            layer = graph.layer(call)
            if layer not in self.shared:
                now = max(now, self.owners.get(layer, now))
            if layer not in self.owners and layer not in self.shared:
                self.owners[layer] = now

    def stages(self, graph: Graph) -> dict[fx.Node, int]:
        """The stage of each step, but for reads of parameters and buffers.

        Raises:
            Refused: If a call needs a value of a later stage.
        """
        found: dict[fx.Node, int] = {}
        calls = self._calls(graph)
        for node, lead in zip(graph.nodes, leads(graph), strict=True):
            if node.op == "get_attr":
                continue
            made = max((found[each] for each in node.all_input_nodes if each in found), default=0)
            base = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
            if node.op == "call_module" and graph.layer(node) in self.owners:
                found[node] = self.owners[graph.layer(node)]
                if made > found[node]:
                    raise Refused(_backwards(node, found[node], made))
            elif base in found and _is_read(node) and made == found[base]:
                found[node] = made
            else:
                found[node] = max(made, calls[lead] if calls else 0)
        return found

    def _calls(self, graph: Graph) -> list[int]:
        """The stage of each call."""
        found, now = [], 0
        places: dict[nn.Module, Iterator[int]] = {k: iter(v) for k, v in self.shared.items()}
        for call in graph.calls:
            layer = graph.layer(call)
            if layer in self.owners:
                j = self.owners[layer]
            elif not is_stateless(layer):
                raise Refused(_of_no_stage(call, layer))
            else:
                j = max(now, next(places[layer], now) if layer in places else now)
            now = max(now, j)
            found.append(j)
        return found

    def _settle(self) -> None:
        """Let layers whose calls are all on one stage belong to it."""
        for layer, stages in list(self.shared.items()):
            if len(set(stages)) == 1 or not is_stateless(layer):
                self.owners[layer] = stages[0]
                del self.shared[layer]


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


def _backwards(node: fx.Node, own: int, made: int) -> str:
    return (
        f"a forward must run its layers in the same order in every kind of call: {node.target}, "
        f"on stage {own}, is called at {node.meta['line']} with a value of stage {made}. Choose a "
        "balance that keeps them on one stage."
    )
