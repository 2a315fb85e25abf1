"""Values with one entry per row that are no tensors: lists, tuples and NumPy arrays.

A collate function leaves what has no tensors as a list: names, texts, metadata. If each
micro-batch got all of it, a layer would pair its rows with entries of others. So a list with as
many values as the mini-batch has rows is cut like a tensor. Layers get a list of their rows, of a
class of its own, which tells at the end that the lists of all micro-batches are to be joined.

A list of settings may have as many values by chance. One that had the same length in an earlier
mini-batch with another number of rows is known to be none per row; a user can mark others.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
from torch import Tensor

from lightning_gpipe.core.data.holding import PLAIN, holds_tensor
from lightning_gpipe.core.data.marks import is_per_row, is_whole, mark_per_row
from lightning_gpipe.core.data.pytree import map_nodes, register_as_leaf, tree_flatten

_CAPACITY = 256  # paths of lists; all are forgotten then


class Entries(tuple[Any, ...]):
    """The entries of a list as one leaf of a tree; a layer cannot edit them for another."""

    __slots__ = ()


class Texts(Entries):
    """The strings of a list that a layer made; there may be one per row."""

    __slots__ = ()


class RowList(list[Any]):
    """A list with an entry per row of the micro-batch."""


class RowTuple(tuple[Any, ...]):
    """A tuple with an entry per row of the micro-batch."""

    __slots__ = ()


class _TextList(RowList):
    """A list of an output that may have one."""


class _TextTuple(RowTuple):
    """A tuple of an output that may have one."""

    __slots__ = ()


for _kind, _leaf in (
    (RowList, Entries),
    (RowTuple, Entries),
    (_TextList, Texts),
    (_TextTuple, Texts),
):
    register_as_leaf(_kind, _leaf, _kind)


class RowValues:
    """Finds the lists and arrays of mini-batches that have an entry per row."""

    def __init__(self) -> None:
        self._others: dict[str, int] = {}  # the length of lists that had none, by path

    def marked(self, batch: Any, rows: int) -> Any:
        """``batch`` with its lists and arrays of an entry per row marked.

        Args:
            batch: The mini-batch.
            rows: Its number of rows.

        Raises:
            ValueError: If it cannot be told whether a tuple or a nested list has one per row.
        """
        if all(isinstance(leaf, Tensor) for leaf in tree_flatten(batch).leaves):
            return batch
        return self._marked("", batch, rows)

    def _marked(self, path: str, tree: Any, rows: int) -> Any:
        def mark(path: str, value: Any) -> Any:
            if isinstance(value, Tensor) or is_whole(value):
                return value
            if self._per_row(path, len(value), rows):
                return _row_values(path, value)
            if isinstance(value, np.ndarray) or all(isinstance(each, PLAIN) for each in value):
                return value
            return type(value)(
                self._marked(f"{path}[{k}]", each, rows) for k, each in enumerate(value)
            )

        return map_nodes(lambda inner, value: mark(path + inner, value), tree, _is_candidate)

    def _per_row(self, path: str, length: int, rows: int) -> bool:
        if length == rows:
            return self._others.get(path) != length
        if len(self._others) >= _CAPACITY:
            self._others.clear()
        self._others[path] = length
        return False


def pieces_of(value: Any, sizes: Sequence[int]) -> list[Any]:
    """The entries of each micro-batch; ``value`` is a marked array, or the entries of a list."""
    pieces = [value[first:last] for first, last in pairwise(accumulate(sizes, initial=0))]
    return [_like(value, piece) for piece in pieces]


def joined(values: Sequence[Any]) -> Any:
    """The entries of all micro-batches."""
    if isinstance(values[0], np.ndarray):
        return np.concatenate([np.asarray(each) for each in values])
    return Entries(chain.from_iterable(values))


def permuted(value: Any, order: Sequence[int]) -> Any:
    """The entries in another order."""
    if isinstance(value, np.ndarray):
        return _like(value, value[list(order)])
    return Entries(value[k] for k in order)


def _like(value: Any, entries: Any) -> Any:
    """Some of the entries of ``value``, as what it is."""
    if not isinstance(value, np.ndarray):
        return Entries(entries)
    return mark_per_row(entries) if is_per_row(value) else entries


def has_entries(leaf: Any) -> bool:
    """Whether this leaf is a marked array or the entries of a list, known to be one per row."""
    return type(leaf) is Entries or is_per_row(leaf)


def gathered(output: Any) -> Any:
    """``output`` with one leaf for each list of strings, since it may have one per row."""

    def gather(path: str, value: Any) -> Any:
        if is_whole(value):
            return value
        return _TextList(value) if isinstance(value, list) else _TextTuple(value)

    return map_nodes(gather, output, _is_texts)


def plain(output: Any) -> Any:
    """``output`` with plain lists and tuples for those that had an entry per row."""
    return map_nodes(
        lambda _, value: list(value) if isinstance(value, list) else tuple(value),
        output,
        lambda value: isinstance(value, RowList | RowTuple),
    )


def texts_in(batch: Any) -> list[Sequence[str]]:
    """The lists and tuples of strings in a mini-batch."""
    found: list[Sequence[str]] = []
    map_nodes(lambda _, value: found.append(value), batch, _is_texts)
    return found


def _row_values(path: str, value: Any) -> Any:
    """A list or array marked as having an entry per row."""
    if isinstance(value, np.ndarray):
        return mark_per_row(value)
    _refuse_ambiguous(path, value)
    return RowList(value) if isinstance(value, list) else RowTuple(value)


def _is_candidate(value: Any) -> bool:
    """Whether this may have an entry per row, or is to be left as it is."""
    if is_whole(value) or isinstance(value, Tensor):
        return True
    if type(value) is np.ndarray:
        return value.ndim > 0
    return type(value) in (list, tuple) and len(value) > 0 and not holds_tensor(value)


def _is_texts(value: Any) -> bool:
    """Whether this is a list or tuple of strings, or is to be left as it is."""
    if is_whole(value):
        return True
    strings = type(value) in (list, tuple) and len(value) > 0
    return strings and all(isinstance(each, str | bytes) for each in value)


def _refuse_ambiguous(path: str, value: Sequence[Any]) -> None:
    rows = len(value)
    if isinstance(value, tuple) and not all(isinstance(each, str | bytes) for each in value):
        found = f"a tuple of {rows} values, which may also be settings, such as a size"
    elif all(isinstance(each, list | tuple) and len(each) == rows for each in value):
        found = f"{rows} lists of {rows} values each, where either may be the rows"
    else:
        return
    raise ValueError(
        f"it must be clear which values of a mini-batch there are for each row: got input{path} in "
        f"a mini-batch of {rows} rows, {found}. Pass a list or a tensor with an entry per row, or "
        "write whole(value), from lightning_gpipe, if every micro-batch needs all of it."
    )
