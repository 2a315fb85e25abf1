"""Padded sequences, with each micro-batch trimmed to its longest sequence.

Padding costs every stage time. Rows that are sorted by length before they are split have similar
lengths in a micro-batch. Micro-batches get about equal numbers of tokens, including padding: with
equal numbers of rows, the other stages would wait for the first micro-batch::

    the batch, padded    sorted         micro-batches, trimmed

    ####----             ########       ########    #####   ###
    ########             #####---                   ####-   ###
    ##------             ####----                           ##-
    #####---             ###-----
    ###-----             ###-----
    ###-----             ##------
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from lightning_gpipe.core.data.microbatch.merging import merged
from lightning_gpipe.core.data.microbatch.microbatching import Division, MicroBatching
from lightning_gpipe.core.data.microbatch.order import RowOrder, even_tokens
from lightning_gpipe.core.data.microbatch.row_values import RowValues, has_entries, permuted
from lightning_gpipe.core.data.microbatch.rows import (
    count_rows,
    division_of,
    even_sizes,
    has_rows,
    split_rows,
)
from lightning_gpipe.core.data.pytree import FlatTree, entries, tree_flatten, tree_unflatten


class PaddedSequences(MicroBatching):
    """Trims each micro-batch to its longest sequence, and pads the outputs back.

    Padding must not affect the layers' other results, because it may be trimmed; use masks or
    lengths in the layers. A layer that needs a mask computes it from the lengths and the shape of
    its input. The caller notices neither the sorting nor the trimming: outputs have the batch's
    order of rows and its padded length.

    Example::

        strategy = GPipeStrategy(
            microbatching=PaddedSequences("lengths", trim=["tokens"], pad_outputs=True)
        )
        ...
        logits = self.layers({"tokens": tokens, "lengths": lengths})  # (rows, longest, classes)

    Args:
        lengths: The entry of the batch with each row's length, integers of shape ``(rows,)``. An
            entry is a key of the outermost dict, an index in the outermost tuple or list, or a
            field of the outermost dataclass.
        trim: The entries with tensors of shape ``(rows, longest, ...)``, to trim in dim 1.
        pad_outputs: The entries of the output with this shape, to pad back in dim 1: a list; True
            for all, False for none.
        padding_value: The value with which outputs are padded.
        sort: Whether to sort the rows by length, the longest first, and to split them into
            micro-batches with about equal numbers of tokens. False splits them into equal numbers
            of rows, in the order of the batch.

    Raises:
        TypeError: If ``trim`` is not a list of entries, or ``pad_outputs`` neither that nor a bool.
    """

    def __init__(
        self,
        lengths: str | int,
        *,
        trim: list[str | int],
        pad_outputs: bool | list[str | int],
        padding_value: float = 0.0,
        sort: bool = True,
    ) -> None:
        if not isinstance(trim, list) or not trim:
            raise TypeError(
                f"trim must list the entries of the batch to trim: got {trim!r}. Write "
                'trim=["tokens"], for example.'
            )
        if not isinstance(pad_outputs, bool | list):
            raise TypeError(
                "pad_outputs must be True, False or the entries of the output to pad: got "
                f"{pad_outputs!r}."
            )
        self._lengths = lengths
        self._trim = trim
        self._pad_outputs = pad_outputs
        self._padding_value = padding_value
        self._sort = sort
        self._values = RowValues()
        self._latest: tuple[weakref.ref[Tensor], int, RowOrder] | None = None

    def __repr__(self) -> str:
        return (
            f"PaddedSequences({self._lengths!r}, trim={self._trim}, "
            f"pad_outputs={self._pad_outputs}, padding_value={self._padding_value}, "
            f"sort={self._sort})"
        )

    @override
    def split(self, batch: Any, chunks: int) -> list[Any]:
        """Split ``batch`` along dim 0, and trim each micro-batch.

        It reads the lengths, which synchronises with their device.

        Raises:
            ValueError: If an entry is missing, or the lengths do not fit the batch.
        """
        count_rows(batch)  # refuse tensors that disagree: reordering them would drop rows
        order = self._order(batch)
        rows = len(order.lengths)
        sizes = even_tokens(order.lengths, chunks) if self._sort else even_sizes(rows, chunks)
        firsts = accumulate(sizes, initial=0)
        order.sizes[len(sizes)] = sizes
        if len(sizes) > 1 or order.permutation is not None:
            batch = self._values.marked(batch, rows)
        if order.permutation is not None:
            batch = _reordered(batch, order.permutation)
        microbatches = split_rows(batch, sizes)
        return [
            _changed(piece, partial(_trimmed, longest=order.longest_of(first, size)), self._trim)
            for piece, first, size in zip(microbatches, firsts, sizes, strict=False)
        ]

    @override
    def merge(self, outputs: Sequence[Any], batch: Any) -> Any:
        """Pad the outputs to the length of ``batch``, and put their rows back in its order.

        Raises:
            ValueError: If an entry is missing, an output does not have the rows of the batch, or
                the micro-batches of an output differ in more than their rows.
        """
        order = self._order(batch)
        pad = partial(_padded, longest=order.longest, value=self._padding_value)
        where = self._pad_outputs
        if where is not False:
            outputs = [
                _changed(output, pad, None if where is True else where) for output in outputs
            ]
        _check_widths(outputs)
        sizes = partial(order.sizes.get, len(outputs))
        return merged(outputs, batch, sizes, restore=order.restore)

    @override
    def merge_results(self, results: Sequence[Any], batch: Any) -> Any:
        if isinstance(results[0], list):
            return list(self._order(batch).restore(list(chain(*results))))
        return self._order(batch).restore(torch.cat(list(results)))

    @override
    def division(self, microbatches: Sequence[Any]) -> Division:
        return division_of(microbatches)

    def _order(self, batch: Any) -> RowOrder:
        """The order of the rows; merge gets it from a cache and does not read lengths again."""
        lengths, longest = self._lengths_in(batch), self._padded_length_in(batch)
        version = 0 if lengths.is_inference() else lengths._version
        if self._latest is not None and not lengths.is_inference():
            reference, latest_version, order = self._latest
            same = reference() is lengths and latest_version == version
            if same and order.longest == longest:
                return order
        order = RowOrder.of(lengths.tolist(), longest, sort=self._sort)
        if order.lengths and not 0 <= min(order.lengths) <= max(order.lengths) <= order.longest:
            raise ValueError(
                "lengths must be between 0 and the padded length: got "
                f"{min(order.lengths)}..{max(order.lengths)} in {self._lengths!r} for sequences "
                f"padded to {order.longest} in {self._trim}."
            )
        self._latest = weakref.ref(lengths), version, order
        return order

    def _lengths_in(self, batch: Any) -> Tensor:
        tensors = _at(batch, self._lengths)
        if len(tensors) != 1 or tensors[0].dim() != 1 or not _is_integer(tensors[0]):
            raise ValueError(
                f"the entry {self._lengths!r} of the batch must be one tensor of integers of shape "
                f"(rows,), the lengths: got {_described(tensors)}. The entries are {_names(batch)}."
            )
        return tensors[0]

    def _padded_length_in(self, batch: Any) -> int:
        tensors = {entry: _at(batch, entry) for entry in self._trim}
        longest = {x.size(1) if x.dim() > 1 else -1 for values in tensors.values() for x in values}
        if len(longest) != 1 or -1 in longest or not all(tensors.values()):
            described = {entry: _described(values) for entry, values in tensors.items()}
            raise ValueError(
                f"the entries {self._trim} of the batch must be tensors of one padded length, "
                f"(rows, longest, ...): got {described}. The entries are {_names(batch)}."
            )
        return longest.pop()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_latest": None}


def _trimmed(tensor: Tensor, longest: int) -> Tensor:
    return tensor.narrow(1, 0, longest)


def _padded(tensor: Tensor, longest: int, value: float) -> Tensor:
    if tensor.dim() < 2 or tensor.size(1) > longest:
        raise ValueError(
            f"outputs to pad must have the shape (rows, up to {longest}, ...): got "
            f"{tuple(tensor.shape)}. Name the entries that have it, or write pad_outputs=False."
        )
    if tensor.new_tensor(value).item() != value and value == value:
        raise ValueError(
            f"padding_value must be a value of the outputs' type: got {value} for {tensor.dtype}."
        )
    missing = longest - tensor.size(1)
    return F.pad(tensor, [0, 0] * (tensor.dim() - 2) + [0, missing], value=value)


def _changed(tree: Any, function: Callable[[Tensor], Tensor], where: list[str | int] | None) -> Any:
    names = entries(tree, where or ())
    leaves, spec = tree_flatten(tree)
    changed = [
        function(leaf) if (where is None or name in where) and has_rows(leaf) else leaf
        for leaf, name in zip(leaves, names, strict=True)
    ]
    return tree_unflatten(FlatTree(changed, spec))


def _reordered(tree: Any, order: Tensor) -> Any:
    leaves, spec = tree_flatten(tree)
    changed = [permuted(x, order) if has_entries(x) or has_rows(x) else x for x in leaves]
    return tree_unflatten(FlatTree(changed, spec))


def _at(tree: Any, entry: str | int) -> list[Tensor]:
    leaves = zip(tree_flatten(tree).leaves, entries(tree), strict=True)
    return [leaf for leaf, name in leaves if name == entry and isinstance(leaf, Tensor)]


def _names(tree: Any) -> list[str | int | None]:
    return list(dict.fromkeys(entries(tree)))


def _described(tensors: list[Tensor]) -> str:
    shapes = [f"{str(x.dtype).removeprefix('torch.')} of shape {tuple(x.shape)}" for x in tensors]
    return ", ".join(shapes) or "no tensor"


def _is_integer(tensor: Tensor) -> bool:
    kind = tensor.dtype
    return not (kind.is_floating_point or kind.is_complex or kind is torch.bool)


def _check_widths(outputs: Sequence[Any]) -> None:
    for column in zip(*(tree_flatten(output).leaves for output in outputs), strict=False):
        widths = {x.shape[1:] for x in column if has_rows(x)}
        if len(widths) > 1:
            raise ValueError(
                "outputs of trimmed micro-batches must agree in all but their rows: got shapes "
                f"{[tuple(x.shape) for x in column]}. Name the entries to pad back to the batch's "
                "length with pad_outputs=[...], or write pad_outputs=True for all."
            )
