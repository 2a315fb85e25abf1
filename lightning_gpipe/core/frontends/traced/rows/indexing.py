"""The dim of the rows after ``x[index]``, and a check that no index takes some of them only."""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor, fx

from lightning_gpipe.core.frontends.traced.traced_values import ValueKind, function_name, kind_of
from lightning_gpipe.core.frontends.traced.unsupported import UnsupportedForward

ACROSS = (
    "a forward must not compute across the rows of a mini-batch, since a stage has those of a "
    "micro-batch: {line} {what}. Compute it outside of the model; or, if each micro-batch may "
    "count for itself, in a module of its own, which runs as one layer."
)


class AcrossRows(Exception):
    """Says how a step computes across rows."""


def dim_after(dim: int, index: Any) -> int | None:
    """Return the dim of the rows in ``x[index]``, where they are in ``dim`` of x; None if unknown.

    Raises:
        AcrossRows: If the index takes some of them.
    """
    before = 0  # dims of the result
    at = 0  # of x
    for item in index if isinstance(index, tuple) else (index,):
        if at > dim:
            break
        if item is Ellipsis:
            return before if at == dim else None
        is_number = isinstance(item, fx.Node) and kind_of(item) is ValueKind.NUMBER
        if at == dim and item is not None:
            if item == slice(None):
                return before
            if isinstance(item, fx.Node) and not is_number:
                return before  # a mask, or one index for each row: see get_rows
            raise AcrossRows("takes some of the rows")
        if not (item is None or isinstance(item, slice | int) or is_number):
            return None
        at += item is not None
        before += item is None or isinstance(item, slice)
    return before + max(0, dim - at)


def needs_look(node: fx.Node) -> bool:
    """Return whether only a run tells if ``x[index]`` takes rows by number."""
    base, index = node.args[0], node.args[1]
    if isinstance(index, int):  # of a tuple, or of a tensor
        return isinstance(base, fx.Node) and base.op == "call_module"
    first = _first(index)
    return isinstance(first, fx.Node) and function_name(first) != "arange"


def get_rows(value: Any, index: Any, *, line: str) -> Any:
    """Return ``value[index]`` of a value with its rows in dim 0.

    Raises:
        UnsupportedForward: If it takes rows of a tensor by their number; names the user's line.
    """
    first = _first(index)
    # Neither bool nor uint8, which are masks.
    numbers = isinstance(first, Tensor) and first.dtype.itemsize > 1
    if isinstance(value, Tensor) and (numbers or isinstance(first, int)):
        raise UnsupportedForward(ACROSS.format(line=line, what="takes rows by their number"))
    return operator.getitem(value, index)


def _first(index: Any) -> Any:
    return index[0] if isinstance(index, tuple) and index else index
