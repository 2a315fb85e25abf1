"""Reductions over all rows in a traced forward.

``x / x.sum()`` would divide each micro-batch by its own sum. A reduction without a dim is over the
rows as well, so what is computed from it must not meet values with rows again, nor a layer. As an
output of the model, a loss, it is left to who merges the micro-batches.
"""

from __future__ import annotations

from torch import fx

from lightning_gpipe.core.frontends.traced.graph import Graph
from lightning_gpipe.core.frontends.traced.numbers import rows_in
from lightning_gpipe.core.frontends.traced.refused import Refused
from lightning_gpipe.core.frontends.traced.symbolic import hold
from lightning_gpipe.core.frontends.traced.values import Kind, node_kind

_NAMES = frozenset(
    {"mean", "sum", "prod", "std", "var", "norm", "max", "min", "amax", "amin", "median"}
    | {"nanmean", "nansum", "any", "all"}
)
_CHECKS = frozenset({hold.__name__, "_assert"})


def check_reductions(graph: Graph) -> None:
    """Raise if a reduction over all rows is used beside values with rows.

    Raises:
        Refused: Names the line.
    """
    rows = rows_in(graph).values
    reduced: dict[fx.Node, fx.Node] = {}  # what is computed from reductions alone, and of which
    for node in graph.nodes:
        found = [each for each in node.all_input_nodes if each in reduced]
        others = [each for each in node.all_input_nodes if each in rows and each not in reduced]
        beside = bool(others) or node.op == "call_module"
        if found and beside and getattr(node.target, "__name__", "") not in _CHECKS:
            raise Refused(
                "a forward must not compute over all rows of a mini-batch, since a stage has those "
                f"of a micro-batch: {reduced[found[0]].meta['line']} reduces over them, and "
                f"{node.meta['line']} uses it beside values per row, or in a layer. "
                "Give the dims, as in x.mean(dim=1), or compute it outside of the model."
            )
        if found:
            reduced[node] = reduced[found[0]]
        elif _reduces_all(node, rows):
            reduced[node] = node


def _reduces_all(node: fx.Node, rows: set[fx.Node]) -> bool:
    if node.op == "call_function":
        name = getattr(node.target, "__name__", "")
    elif node.op == "call_method":
        name = str(node.target)
    else:
        return False
    of = node.args[0] if len(node.args) == 1 else None
    return (
        name in _NAMES
        and of in rows
        and isinstance(of, fx.Node)
        and node_kind(of) is Kind.TENSOR
        and not {"dim", "axis"} & set(node.kwargs)
    )
