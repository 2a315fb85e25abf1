"""The dim of the rows in each value of a traced forward, and a check of steps across the rows.

A stage has the rows of a micro-batch. Between layers, ``x - x.mean(0)``, a softmax or a sort along
the rows, ``x[0]`` or ``x @ x.t()`` would see those alone, and give something else than the plain
module. Shapes are not known yet, but the steps tell where rows go: arguments and the outputs of
layers have them in dim 0, ``transpose(0, 1)`` moves them, ``x.view(n, -1)`` leaves them. A dim may
count from the end, as those of ``transpose(-1, -2)``: it is taken for another one than that of the
rows, and a stage checks this, which knows the number of dims. Where the dim of the rows cannot be
told, nothing is refused.
"""

from __future__ import annotations

from torch import fx

from lightning_gpipe.core.frontends.traced.call_graph import CallGraph
from lightning_gpipe.core.frontends.traced.row_checks import (
    dim_of_size,
    is_elementwise,
    is_filled,
    rows_in,
)
from lightning_gpipe.core.frontends.traced.row_rules import RULES, after_einsum
from lightning_gpipe.core.frontends.traced.traced_call import TracedCall, across_rows


class RowDims(dict[fx.Node, int | None]):
    """The dim of the rows in each value that has rows; None where it cannot be told.

    Attributes:
        others: For each step, the dims that must not be the rows', in the tensor of this rank.
        untold: The steps that no rule tells of.
    """

    def __init__(self, graph: CallGraph) -> None:
        rows, counts = rows_in(graph)
        super().__init__({node: 0 for node in graph.inputs if node in rows})
        self.others: dict[fx.Node, tuple[int, list[int]]] = {}
        self.untold: set[fx.Node] = set()
        for node in graph.nodes:
            if node not in rows:
                continue
            if is_filled(node):
                self[node] = dim_of_size(node, counts)
                continue
            call = TracedCall(node, self)
            self[node] = _dim_after(call)
            if call.others and call.dim is not None:
                self.others[node] = call.dim, call.others
            if call.untold:
                self.untold.add(node)


def _dim_after(call: TracedCall) -> int | None:
    if call.name == "einsum":
        return after_einsum(call)
    rule = RULES.get(call.name)
    if rule is not None:
        return None if call.dim is None else rule(call, call.dim)
    if call.name and call.rows - {0} and not is_elementwise(call.name.rstrip("_")):
        raise across_rows(call.line, f"computes {call.name} of rows that are not in dim 0")
    call.untold = bool(call.name) and call.dim == 0 and not is_elementwise(call.name.rstrip("_"))
    # A layer, or an elementwise function: rows stay in their dim.
    return next(iter(call.rows)) if len(call.rows) == 1 else None
