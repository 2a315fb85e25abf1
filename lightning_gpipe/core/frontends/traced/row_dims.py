"""The dim of the rows in each value of a traced forward, and a check of steps across the rows.

In a stage, ``x - x.mean(0)``, a softmax or a sort along the rows, ``x[0]`` or ``x @ x.t()`` would
see the rows of a micro-batch alone. Shapes are not known yet, but the steps tell where rows go:
arguments and the outputs of layers have them in dim 0, ``transpose(0, 1)`` moves them,
``x.view(n, -1)`` leaves them. A dim that counts from the end is taken for another one. Where the
dim of the rows cannot be told, nothing is refused here, but by a trial when a stage first runs.

In a stage ``x.size(0)`` is the number of rows of a micro-batch: right as a size, as in
``x.view(x.size(0), -1)``, and refused as a value, as in ``x.sum() / x.size(0)``. ``x / x.sum()``
would divide each micro-batch by its own sum: the result of a reduction without a dim must not meet
values with rows again, nor a layer. As an output, a loss, it is merged with those of the other
micro-batches.
"""

from __future__ import annotations

import operator
from collections.abc import Container
from typing import Any

import torch
from torch import fx

from lightning_gpipe.core.frontends.traced.call_graph import CallGraph, UnsupportedForward
from lightning_gpipe.core.frontends.traced.row_rules import REDUCTIONS, RULES, after_einsum
from lightning_gpipe.core.frontends.traced.symbolic import (
    ValueKind,
    first_input,
    function_name,
    hold,
    kind_of,
)
from lightning_gpipe.core.frontends.traced.traced_call import TracedCall, across_rows

_OPERATORS = frozenset(getattr(operator, name) for name in operator.__all__)
_COMPUTE = frozenset(
    {"add", "sub", "mul", "div", "divide", "true_divide", "multiply", "subtract", "pow", "rsub"}
    | {"floor_divide", "remainder", "fmod", "clamp", "add_", "sub_", "mul_", "div_", "pow_"}
)
_ROW_NUMBERS = frozenset(
    {torch.arange, torch.linspace, torch.eye, torch.tril_indices, torch.triu_indices}
)
# The position of the dims in the arguments of a reduction, without which it is over all dims.
_REDUCTIONS = {name: at for at, names in REDUCTIONS.items() for name in names.split()}
_REDUCTIONS |= {"dist": 3, "trace": 3}  # which have none
CHECKS = frozenset({hold.__name__, "_assert", "register_hook", "retain_grad", "requires_grad_"})
_KEEP_DIMS = (  # functions that are not elementwise, but keep rows apart, whatever their dim is
    "to float double half bfloat16 type type_as contiguous detach cpu cuda size dim numel hold "
    "dropout layer_norm rms_norm embedding zeros_like ones_like full_like empty_like rand_like "
    "randn_like unflatten multi_head_attention_forward"
)
_APART = frozenset(_KEEP_DIMS.split())
_MAY_FOLD = "view reshape flatten unflatten expand repeat tile view_as reshape_as"
_FOLD = frozenset(_MAY_FOLD.split())
_FILLED = frozenset({"zeros", "ones", "full", "empty"})


class RowDims(dict[fx.Node, int | None]):
    """The dim of the rows in each value, or None.

    ``counts`` are the numbers of rows, and those that are computed from them; ``folded`` the values
    that may have several entries for each row.
    """

    def __init__(self, graph: CallGraph) -> None:
        rows, counts = _rows_in(graph)
        super().__init__({node: 0 for node in graph.inputs if node in rows})
        self.counts = counts
        totals = ("numel", "nelement")
        numbers = {x for x in counts if _is_count(x, rows) and x.target not in totals}
        self.folded: set[fx.Node] = set()
        for node in graph.nodes:
            if node not in rows:
                continue
            call, filled = TracedCall(node, self), _is_filled(node)
            self[node] = _dim_of_size(node, counts) if filled else _dim_after(call)
            one_each = call.name in ("view", "reshape") and _begins_with(call, numbers)
            before = self.folded & set(node.all_input_nodes)
            if not one_each and (filled or before or _may_fold(call)):
                self.folded.add(node)


def _begins_with(call: TracedCall, numbers: Container[Any]) -> bool:
    return any(size in numbers for size in call.sizes("shape")[:1])


def _may_fold(call: TracedCall) -> bool:
    return call.name in _FOLD and not (
        call.name == "flatten" and call.at(1, "start_dim", default=0)
    )


def _dim_after(call: TracedCall) -> int | None:
    if call.name == "einsum":
        return after_einsum(call)
    rule = RULES.get(call.name)
    if rule is not None:
        return None if call.dim is None else rule(call, call.dim)
    if call.name and call.rows - {0} and not _is_elementwise(call.name.rstrip("_")):
        raise across_rows(call.line, f"computes {call.name} of rows that are not in dim 0")
    if not call.name and call.args and call.depends(call.args[0]):
        return call.dim  # a layer leaves rows where they are in its first argument
    return next(iter(call.rows)) if len(call.rows) == 1 else None


def _rows_in(graph: CallGraph) -> tuple[set[fx.Node], set[fx.Node]]:
    """Find the values that depend on the rows of the micro-batch, and the numbers of rows.

    The latter include what is computed from them. Raise UnsupportedForward where these numbers, or
    a reduction over all rows, would be those of a micro-batch.
    """
    rows = {node for node in graph.inputs if not node.meta["whole"]}
    counts: set[fx.Node] = set()
    for node in graph.nodes:
        if _is_count(node, rows) or _is_computed(node, counts):
            counts.add(node)
        elif not _is_property(node) and set(node.all_input_nodes) & (rows | counts):
            rows.add(node)
    _check_numbers(graph, counts)
    _check_reductions(graph, rows)
    return rows, counts


def _check_numbers(graph: CallGraph, counts: set[fx.Node]) -> None:
    for node in counts:
        if node in graph.outputs:
            raise UnsupportedForward(_message(node, "returns it"))
        for user in node.users:
            if user not in counts and (what := _misuse(node, user, counts)):
                raise UnsupportedForward(_message(user, what))


def _is_property(node: fx.Node) -> bool:
    if kind_of(node) in (ValueKind.NUMBER, ValueKind.SIZES):
        return True
    return node.target is getattr and node.args[1] in ("device", "dtype", "layout")


def _is_count(node: fx.Node, rows: set[fx.Node]) -> bool:
    base = first_input(node)
    if node.op == "call_method" and base in rows:
        dim: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        return node.target in ("numel", "nelement") or (node.target == "size" and dim == 0)
    if base is None or node.target is not operator.getitem or kind_of(base) is not ValueKind.SIZES:
        return False
    return first_input(base) in rows and node.args[1:] == (0,)


def _is_computed(node: fx.Node, counts: set[fx.Node]) -> bool:
    """Return whether a node computes a number from numbers, of which one is of rows."""
    inputs = set(node.all_input_nodes)
    numbers = all(x in counts or kind_of(x) is ValueKind.NUMBER for x in inputs)
    return bool(inputs & counts) and numbers and node.target in _OPERATORS


def _misuse(node: fx.Node, user: fx.Node, counts: Container[fx.Node]) -> str:
    """Say what a step does with a number that is wrong for a number of rows; empty if nothing."""
    if user.target is operator.getitem:
        return "takes rows by it"
    if user.target in _ROW_NUMBERS:
        every = user.target is torch.arange and user.args in ((node,), (0, node))
        every = every and not any(x in counts for x in node.all_input_nodes)
        indices = all(x.target is operator.getitem and x.args[0] is not user for x in user.users)
        return "" if every and indices and user.users else "counts up to it"
    if user.target in _OPERATORS or function_name(user) in _COMPUTE:
        return "computes with it"
    return ""


def _message(node: fx.Node, what: str) -> str:
    return (
        "a number of rows must only be used as a size, since a stage has the rows of a micro-batch "
        f"and not of the whole mini-batch: {node.meta['line']} {what}. Compute it outside of the "
        "model, or give the number to forward as an argument."
    )


def _check_reductions(graph: CallGraph, rows: set[fx.Node]) -> None:
    reduced: dict[fx.Node, fx.Node] = {}  # values computed from reductions alone, and of which
    for node in graph.nodes:
        sources = [x for x in node.all_input_nodes if x in reduced]
        others = any(x in rows and x not in reduced for x in node.all_input_nodes)
        beside = others or node.op == "call_module"
        if sources and beside and function_name(node) not in CHECKS:
            raise over_all_rows(reduced[sources[0]], node)
        if sources:
            reduced[node] = reduced[sources[0]]
        elif _reduces_all(node, rows):
            reduced[node] = node


def over_all_rows(reduction: fx.Node, node: fx.Node) -> UnsupportedForward:
    """Return the error of a step that uses a reduction over all rows."""
    return UnsupportedForward(
        "a forward must not compute over all rows of a mini-batch, since a stage has those of a "
        f"micro-batch: {reduction.meta['line']} reduces over them, and {node.meta['line']} uses it "
        "beside values per row, or in a layer. Give the dims, as in x.mean(dim=1), or compute it "
        "outside of the model."
    )


def _reduces_all(node: fx.Node, rows: set[fx.Node]) -> bool:
    position, value = _REDUCTIONS.get(function_name(node)), first_input(node)
    if position is None or value not in rows or kind_of(value) is not ValueKind.TENSOR:
        return False
    dims = [node.kwargs.get("dim"), node.kwargs.get("axis"), *node.args[position : position + 1]]
    return all(dim is None or isinstance(dim, bool) for dim in dims)  # std(False) is unbiased


def _is_elementwise(name: str) -> bool:
    """Return whether a function computes each element, or what has the same index, for itself."""
    overloads = getattr(torch.ops.aten, name, None)
    kinds = () if overloads is None else overloads.overloads()
    pointwise = any(torch.Tag.pointwise in getattr(overloads, kind).tags for kind in kinds)
    return pointwise or hasattr(operator, name) or name in _APART


def _is_filled(node: fx.Node) -> bool:
    return function_name(node).removeprefix("new_") in _FILLED


def _dim_of_size(node: fx.Node, counts: Container[Any]) -> int | None:
    sizes: Any = node.args[function_name(node).startswith("new_") :]
    if sizes and isinstance(sizes[0], list | tuple):
        sizes = sizes[0]
    return next((k for k, size in enumerate(sizes) if size in counts), None)
