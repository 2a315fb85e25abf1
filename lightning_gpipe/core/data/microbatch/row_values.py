"""Lists, tuples and NumPy arrays with an entry per row.

A collate function leaves names, texts and metadata in lists. One with as many values as the
mini-batch has rows is split like a tensor, so that a layer pairs its rows with their own entries. A
list of settings may have as many values by chance. If it had the same length in an earlier
mini-batch with another number of rows, it is left whole; a user can mark other lists.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
from torch import Tensor

from lightning_gpipe.core.data.marks import is_per_row, is_whole, mark_per_row
from lightning_gpipe.core.data.pytree import map_nodes, register_sequence, tree_flatten
from lightning_gpipe.core.data.tensor_search import PLAIN, holds_tensor

_CAPACITY = 256  # paths of lists; with more, all are forgotten


class Entries(tuple[Any, ...]):
    """The entries of a list as one leaf of a tree, which layers cannot edit."""

    per_row = True  # False if that is unknown: for lists of strings that a layer made


class RowList(list[Any]):
    """A list with an entry per row of the micro-batch."""

    per_row = True


class RowTuple(tuple[Any, ...]):
    """A tuple with an entry per row of the micro-batch."""

    per_row = True


def _leaves_of(value: RowList | RowTuple) -> list[Entries]:
    entries = Entries(value)
    entries.per_row = value.per_row
    return [entries]


def _from_leaves(kind: type[RowList | RowTuple], leaves: Iterable[Any]) -> RowList | RowTuple:
    [leaf] = leaves
    value = kind(leaf)
    value.per_row = not isinstance(leaf, Entries) or leaf.per_row
    return value


for _kind in (RowList, RowTuple):
    register_sequence(_kind, _leaves_of, partial(_from_leaves, _kind))


class RowValues:
    """Finds the lists and arrays of mini-batches that have an entry per row."""

    def __init__(self) -> None:
        self._others: dict[str, int] = {}  # lengths of lists without entries per row, by path

    def marked(self, batch: Any, rows: int) -> Any:
        """Mark lists and arrays with an entry per row; raise ValueError if that is ambiguous."""
        if all(isinstance(leaf, Tensor) for leaf in tree_flatten(batch).leaves):
            return batch
        return self._marked("", batch, rows)

    def _marked(self, path: str, tree: Any, rows: int) -> Any:
        def mark(path: str, value: Any) -> Any:
            if isinstance(value, Tensor) or is_whole(value):
                return value
            if self._per_row(path, len(value), rows):
                return _row_values(path, value)
            if isinstance(value, np.ndarray) or all(isinstance(x, PLAIN) for x in value):
                return value
            return type(value)(self._marked(f"{path}[{k}]", x, rows) for k, x in enumerate(value))

        return map_nodes(lambda inner, value: mark(path + inner, value), tree, may_have_rows)

    def _per_row(self, path: str, length: int, rows: int) -> bool:
        if length == rows:
            return self._others.get(path) != length
        if len(self._others) >= _CAPACITY:
            self._others.clear()
        self._others[path] = length
        return False


def pieces_of(value: Any, sizes: Sequence[int]) -> list[Any]:
    """Split a marked array or the entries of a list into those of each micro-batch."""
    pieces = [value[first:last] for first, last in pairwise(accumulate(sizes, initial=0))]
    return [_like(value, piece) for piece in pieces]


def joined(values: Sequence[Any]) -> Any:
    """Concatenate the entries of all micro-batches."""
    if isinstance(values[0], np.ndarray):
        return np.concatenate(list(map(np.asarray, values)))
    return Entries(chain.from_iterable(values))


def permuted(value: Any, order: Tensor) -> Any:
    """Return the rows of a tensor, or other entries, in another order."""
    if isinstance(value, Tensor):
        return value[order.to(value.device)]
    if isinstance(value, np.ndarray):
        return _like(value, value[order.tolist()])
    return Entries(value[k] for k in order.tolist())


def _like(value: Any, entries: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return Entries(entries)
    return mark_per_row(entries) if is_per_row(value) else entries


def has_entries(leaf: Any) -> bool:
    """Return whether a leaf is a marked array or a list, known to have an entry per row."""
    return leaf.per_row if type(leaf) is Entries else is_per_row(leaf)


def gathered(output: Any) -> Any:
    """Make each list of strings in ``output`` one leaf, since it may have a string per row."""

    def gather(path: str, value: Any) -> Any:
        if is_whole(value):
            return value
        texts = RowList(value) if isinstance(value, list) else RowTuple(value)
        texts.per_row = False
        return texts

    return map_nodes(gather, output, _is_texts)


def plain(output: Any) -> Any:
    """Replace lists and tuples of an entry per row in ``output`` by plain ones."""
    return map_nodes(
        lambda _, value: list(value) if isinstance(value, list) else tuple(value),
        output,
        lambda value: isinstance(value, RowList | RowTuple),
    )


def texts_in(batch: Any) -> list[Sequence[str]]:
    """Return the lists and tuples of strings in a mini-batch."""
    texts: list[Sequence[str]] = []
    map_nodes(lambda _, value: texts.append(value), batch, _is_texts)
    return texts


def _row_values(path: str, value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return mark_per_row(value)
    _refuse_ambiguous(path, value)
    return RowList(value) if isinstance(value, list) else RowTuple(value)


def may_have_rows(value: Any) -> bool:
    """Return True if a node may have an entry per row, or must be left as it is."""
    if is_whole(value) or isinstance(value, Tensor):
        return True
    if type(value) is np.ndarray:
        return value.ndim > 0
    return type(value) in (list, tuple) and len(value) > 0 and not holds_tensor(value)


def has_entry_per_row(value: Any, rows: Collection[int]) -> bool:
    """Return True for a list, an array or a tuple of strings as long as one of these numbers."""
    listed = isinstance(value, list | np.ndarray) or (
        isinstance(value, tuple) and all(isinstance(entry, str) for entry in value)
    )
    return listed and len(value) in rows and not is_whole(value) and not holds_tensor(value)


def _is_texts(value: Any) -> bool:
    """Return whether a node is a list or tuple of strings, or must be left as it is."""
    if is_whole(value):
        return True
    strings = type(value) in (list, tuple) and len(value) > 0
    return strings and all(isinstance(x, str | bytes) for x in value)


def _refuse_ambiguous(path: str, value: Sequence[Any]) -> None:
    rows = len(value)
    if isinstance(value, tuple) and not all(isinstance(x, str | bytes) for x in value):
        what = f"a tuple of {rows} values, which may also be settings, such as a size"
    elif all(isinstance(x, list | tuple) and len(x) == rows for x in value):
        what = f"{rows} lists of {rows} values each, where either may be the rows"
    else:
        return
    raise ValueError(
        f"it must be clear which values of a mini-batch there are for each row: got input{path} in "
        f"a mini-batch of {rows} rows, {what}. Pass a list or a tensor with an entry per row, or "
        "write whole(value), from lightning_gpipe, if every micro-batch needs all of it."
    )
