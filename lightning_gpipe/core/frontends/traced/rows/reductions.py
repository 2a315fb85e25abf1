"""Reductions over all rows in a traced forward.

``x / x.sum()`` would divide each micro-batch by its own sum. A reduction without a dim is over the
rows as well, so its result must not meet values with rows again, nor a layer. As an output of the
model, a loss, it is merged with those of the other micro-batches.
"""

from __future__ import annotations

from torch import fx

from lightning_gpipe.core.frontends.traced.call_graph import CallGraph
from lightning_gpipe.core.frontends.traced.symbolic import hold
from lightning_gpipe.core.frontends.traced.traced_values import ValueKind, function_name, kind_of
from lightning_gpipe.core.frontends.traced.unsupported import UnsupportedForward

_NAMES = frozenset(
    {"mean", "sum", "prod", "std", "var", "norm", "max", "min", "amax", "amin", "median"}
    | {"nanmean", "nansum", "any", "all"}
)
_CHECKS = frozenset({hold.__name__, "_assert"})


def check_reductions(graph: CallGraph, rows: set[fx.Node]) -> None:
    """Raise UnsupportedForward if a reduction over all rows is used beside values with ``rows``."""
    reduced: dict[fx.Node, fx.Node] = {}  # values computed from reductions alone, and of which
    for node in graph.nodes:
        sources = [x for x in node.all_input_nodes if x in reduced]
        others = [x for x in node.all_input_nodes if x in rows and x not in reduced]
        beside = bool(others) or node.op == "call_module"
        if sources and beside and function_name(node) not in _CHECKS:
            raise UnsupportedForward(
                "a forward must not compute over all rows of a mini-batch, since a stage has those "
                f"of a micro-batch: {reduced[sources[0]].meta['line']} reduces over them, and "
                f"{node.meta['line']} uses it beside values per row, or in a layer. "
                "Give the dims, as in x.mean(dim=1), or compute it outside of the model."
            )
        if sources:
            reduced[node] = reduced[sources[0]]
        elif _reduces_all(node, rows):
            reduced[node] = node


def _reduces_all(node: fx.Node, rows: set[fx.Node]) -> bool:
    return (
        function_name(node) in _NAMES
        and len(node.args) == 1
        and node.args[0] in rows
        and kind_of(node.args[0]) is ValueKind.TENSOR
        and not {"dim", "axis"} & set(node.kwargs)
    )
