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

from lightning_gpipe.core.frontends.traced.graph import Graph
from lightning_gpipe.core.frontends.traced.refused import Refused
from lightning_gpipe.core.frontends.traced.values import Kind, node_kind

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

    @property
    def either(self) -> set[fx.Node]:
        """All of them."""
        return self.values | self.counts


def check_numbers(graph: Graph) -> None:
    """Raise if a number of rows is used as a value.

    Raises:
        Refused: Names the line.
    """
    counts = rows_in(graph).counts
    for node in counts:
        if node in graph.outputs:
            raise Refused(_message(node, "returns it"))
        for user in node.users:
            if user not in counts and (what := _misuse(user)):
                raise Refused(_message(user, what))


def rows_in(graph: Graph) -> RowsIn:
    """The values of a graph that depend on the rows of the micro-batch."""
    found = RowsIn({node for node in graph.inputs if not node.meta["whole"]}, set())
    for node in graph.nodes:
        of = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        if _is_count(node, of, found.values) or _computed(node, found.counts):
            found.counts.add(node)
        elif not _is_property(node) and found.either & set(node.all_input_nodes):
            found.values.add(node)
    return found


def _is_property(node: fx.Node) -> bool:
    """Whether a value is a size, a device or such, of another value."""
    if node_kind(node) in (Kind.NUMBER, Kind.SIZES):
        return True
    return node.target is getattr and node.args[1] in ("device", "dtype", "layout")


def _is_count(node: fx.Node, of: fx.Node | None, rows: set[fx.Node]) -> bool:
    if of is None:
        return False
    if node.op == "call_method" and of in rows:
        return node.target in ("numel", "nelement") or (node.target == "size" and _dim(node) == 0)
    if node.target is operator.getitem and node_kind(of) is Kind.SIZES:
        source = of.args[0] if of.args else None
        return source in rows and node.args[1:] == (0,)
    return False


def _dim(node: fx.Node) -> Any:
    return node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")


def _computed(node: fx.Node, counts: set[fx.Node]) -> bool:
    """Whether a node computes a number from numbers, of which one is of rows."""
    found = set(node.all_input_nodes)
    numbers = all(each in counts or node_kind(each) is Kind.NUMBER for each in found)
    return bool(found & counts) and numbers and node.target in _OPERATORS


def _misuse(user: fx.Node) -> str:
    """What a step does with a number that is wrong for a number of rows."""
    if user.op == "call_method" and user.target in _COMPUTE:
        return "computes with it"
    if user.op == "call_function":
        if user.target is operator.getitem:
            return "takes rows by it"
        if user.target in _ROW_NUMBERS:
            indices = all(each.target is operator.getitem for each in user.users)
            return "" if indices and user.users else "counts up to it"
        if user.target in _OPERATORS or getattr(user.target, "__name__", "") in _COMPUTE:
            return "computes with it"
    return ""


def _message(node: fx.Node, what: str) -> str:
    return (
        "a number of rows must only be used as a size, since a stage has the rows of a micro-batch "
        f"and not of the whole mini-batch: {node.meta['line']} {what}. Compute it outside of the "
        "model, or give the number to forward as an argument."
    )
