"""Where the rows of a tensor are after ``x[index]``, and whether that takes some of them only."""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor, fx

from lightning_gpipe.core.frontends.traced.refused import Refused
from lightning_gpipe.core.frontends.traced.values import Kind, node_kind

ACROSS = (
    "a forward must not compute across the rows of a mini-batch, since a stage has those of a "
    "micro-batch: {line} {what}. Compute it outside of the model; or, if each micro-batch may "
    "count for itself, in a module of its own, which runs as one layer."
)


class TakesRows(Exception):
    """An index takes some of the rows."""


def dim_after(dim: int, index: Any) -> int | None:
    """Where the rows are in ``x[index]``; None if that cannot be told.

    Args:
        dim: Where they are in ``x``.
        index: The index, of a traced forward.

    Raises:
        TakesRows: If the index takes some of them.
    """
    before = 0  # dims of the result
    at = 0  # of x
    for item in index if isinstance(index, tuple) else (index,):
        if at > dim:
            break
        if item is Ellipsis:
            return before if at == dim else None
        if at == dim and item is not None:
            if item == slice(None):
                return before
            if isinstance(item, fx.Node) and not _is_number(item):
                return before  # a mask, or one index for each row: see Item
            raise TakesRows
        if not (item is None or isinstance(item, slice | int) or _is_number(item)):
            return None
        at += item is not None
        before += item is None or isinstance(item, slice)
    return before + max(0, dim - at)


def needs_look(node: fx.Node) -> bool:
    """Whether only a run tells if ``x[index]`` takes rows by number."""
    base, index = node.args[0], node.args[1]
    if isinstance(index, int):  # of a tuple, or of a tensor
        return isinstance(base, fx.Node) and base.op == "call_module"
    first = index[0] if isinstance(index, tuple) and index else index
    return isinstance(first, fx.Node) and getattr(first.target, "__name__", "") != "arange"


class Item:
    """Reads an item of a value that has its rows in dim 0, unless it takes rows by number.

    Args:
        line: The user's line that does so.
    """

    def __init__(self, line: str) -> None:
        self._line = line

    def __call__(self, value: Any, index: Any) -> Any:
        """The item.

        Raises:
            Refused: If it takes rows of a tensor by their number.
        """
        first = index[0] if isinstance(index, tuple) and index else index
        by_number = isinstance(first, int) or (isinstance(first, Tensor) and _counts(first))
        if by_number and isinstance(value, Tensor):
            raise Refused(ACROSS.format(line=self._line, what="takes rows by their number"))
        return operator.getitem(value, index)


def _counts(index: Tensor) -> bool:
    return index.dtype.itemsize > 1  # neither bool nor uint8, which are masks


def _is_number(item: Any) -> bool:
    return isinstance(item, fx.Node) and node_kind(item) is Kind.NUMBER
