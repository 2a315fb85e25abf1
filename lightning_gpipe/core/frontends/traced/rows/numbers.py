"""Numbers of rows in a traced forward.

In a stage, ``x.size(0)`` is the number of rows of a micro-batch. As a size it is what is needed:
``x.view(x.size(0), -1)`` views the micro-batch. As a value it is not: ``x.sum() / x.size(0)`` would
divide by another number than the plain module does. The latter is refused.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from lightning_gpipe.core.frontends.traced.call_graph import CallGraph
from lightning_gpipe.core.frontends.traced.traced_values import ValueKind, function_name, kind_of
from lightning_gpipe.core.frontends.traced.unsupported import UnsupportedForward

_OPERATORS = frozenset(getattr(operator, name) for name in operator.__all__)
_COMPUTE = frozenset(
    {"add", "sub", "mul", "div", "divide", "true_divide", "multiply", "subtract", "pow", "rsub"}
    | {"floor_divide", "remainder", "fmod", "clamp", "add_", "sub_", "mul_", "div_", "pow_"}
)
_ROW_NUMBERS = frozenset({torch.arange, torch.linspace})  # as an index: one entry per row


class RowsIn(NamedTuple):
    """The nodes of a graph whose values depend on the rows of the micro-batch.

    Attributes:
        values: Tensors, and others.
        counts: Numbers of rows, and what is computed from them.
    """

    values: set[fx.Node]
    counts: set[fx.Node]


def rows_in(graph: CallGraph) -> RowsIn:
    """Find the values of a graph that depend on the rows of the micro-batch."""
    rows = RowsIn({node for node in graph.inputs if not node.meta["whole"]}, set())
    for node in graph.nodes:
        inputs = set(node.all_input_nodes)
        if _is_count(node, rows.values) or _is_computed(node, inputs, rows.counts):
            rows.counts.add(node)
        elif not _is_property(node) and inputs & (rows.values | rows.counts):
            rows.values.add(node)
    return rows


def check_numbers(graph: CallGraph, rows: RowsIn) -> None:
    """Raise UnsupportedForward if a number of rows is used as a value."""
    for node in rows.counts:
        if node in graph.outputs:
            raise UnsupportedForward(_message(node, "returns it"))
        for user in node.users:
            if user not in rows.counts and (what := _misuse(user)):
                raise UnsupportedForward(_message(user, what))


def _is_property(node: fx.Node) -> bool:
    """Return whether a value is a size, a device or such, of another value."""
    if kind_of(node) in (ValueKind.NUMBER, ValueKind.SIZES):
        return True
    return node.target is getattr and node.args[1] in ("device", "dtype", "layout")


def _is_count(node: fx.Node, rows: set[fx.Node]) -> bool:
    base = node.args[0] if node.args else None
    if not isinstance(base, fx.Node):
        return False
    if node.op == "call_method" and base in rows:
        dim: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        return node.target in ("numel", "nelement") or (node.target == "size" and dim == 0)
    if node.target is operator.getitem and kind_of(base) is ValueKind.SIZES:
        return bool(base.args) and base.args[0] in rows and node.args[1:] == (0,)
    return False


def _is_computed(node: fx.Node, inputs: set[fx.Node], counts: set[fx.Node]) -> bool:
    """Return whether a node computes a number from numbers, of which one is of rows."""
    numbers = all(x in counts or kind_of(x) is ValueKind.NUMBER for x in inputs)
    return not inputs.isdisjoint(counts) and numbers and node.target in _OPERATORS


def _misuse(user: fx.Node) -> str:
    """Say what a step does with a number that is wrong for a number of rows; empty if nothing."""
    if user.target is operator.getitem:
        return "takes rows by it"
    if user.target in _ROW_NUMBERS:
        indices = all(x.target is operator.getitem for x in user.users)
        return "" if indices and user.users else "counts up to it"
    if user.target in _OPERATORS or function_name(user) in _COMPUTE:
        return "computes with it"
    return ""


def _message(node: fx.Node, what: str) -> str:
    return (
        "a number of rows must only be used as a size, since a stage has the rows of a micro-batch "
        f"and not of the whole mini-batch: {node.meta['line']} {what}. Compute it outside of the "
        "model, or give the number to forward as an argument."
    )
