"""Micro-batches of consecutive rows, the default.

Other libraries split each tensor separately and pair up the pieces, so a tensor with fewer rows
silently drops rows of the others. Here all tensors of a batch must have the same number of rows. A
mini-batch of 10 rows in 4 chunks becomes 3, 3, 2 and 2 rows.

Without ``batch_first=True`` PyTorch's layers take sequences as ``(time, rows, ...)``. Other tensors
of such a batch differ: labels ``(rows,)`` have fewer dims, and a key padding mask is ``(rows,
time)`` even there. So the dim of the rows can be set for all tensors or for single entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_gpipe.core.data.marks import is_whole, whole
from lightning_gpipe.core.data.microbatch.merging import are_rows, concatenated, merged
from lightning_gpipe.core.data.microbatch.microbatching import Division, MicroBatching
from lightning_gpipe.core.data.microbatch.row_values import RowValues, has_entries, pieces_of
from lightning_gpipe.core.data.pytree import entries, named_leaves, tree_flatten, tree_unflatten

Dim = int | dict[int | str, int]  # of all tensors, or by entry; 0 for the other entries


class Rows(MicroBatching):
    """Splits along the dim of the rows as evenly as possible, and concatenates outputs.

    Example::

        Rows(at_least=2)  # for batch norms
        Rows(dim=1)  # (time, rows, features) in and out
        Rows(dim=1, output_dim=0)  # (time, rows, features) in, (rows, classes) out
        Rows(dim={"x": 1})  # x is (time, rows, features), other entries are (rows, ...)

    Args:
        at_least: The smallest number of rows in a micro-batch, unless the whole batch has fewer.
        dim: The dim of the rows in the tensors of a batch. A tensor without that dim, such as
            labels of shape ``(rows,)``, is split along dim 0. A dict gives the dim for entries:
            keys of the outermost dict, indices in the outermost tuple or list, or fields of the
            outermost dataclass; others are split along dim 0.
        output_dim: The dim along which outputs are concatenated, likewise. None takes ``dim``.

    Raises:
        TypeError: If a dim is not an integer.
        ValueError: If ``at_least`` is less than 1, or a dim less than 0.
    """

    def __init__(
        self,
        at_least: int = 1,
        *,
        dim: int | dict[int | str, int] = 0,
        output_dim: int | dict[int | str, int] | None = None,
    ) -> None:
        if at_least < 1:
            raise ValueError(f"at_least must be 1 or more, a number of rows: got {at_least}.")
        _check_dim("dim", dim)
        if output_dim is not None:
            _check_dim("output_dim", output_dim)
        self._at_least = at_least
        self._dim = dim
        self._output_dim = output_dim
        self._values = RowValues()

    def __repr__(self) -> str:
        dims = f", dim={self._dim}" if self._dim != 0 else ""
        if self._output_dim is not None:
            dims += f", output_dim={self._output_dim}"
        return f"Rows(at_least={self._at_least}{dims})"

    @property
    def dims(self) -> bool:
        """True if rows may be in another dim than dim 0."""
        return self._dim != 0 or self._output_dim not in (None, 0)

    @override
    def split(self, batch: Any, chunks: int) -> list[Any]:
        """Split ``batch`` into at most ``chunks`` micro-batches of the same structure.

        Tensors with rows are split along the dim of the rows, the larger pieces first; all must
        have the same number of rows. Lists without tensors, tuples of strings and NumPy arrays are
        split likewise if they have as many values. Everything else goes to every micro-batch: 0-dim
        tensors, values marked by :func:`~lightning_gpipe.core.data.marks.whole`, strings, None,
        numbers. A batch of fewer rows than chunks makes fewer micro-batches.

        Raises:
            ValueError: If no tensor has a batch dimension, the tensors disagree on its size, one
                cannot be split because it is sparse or nested, or a tuple may or may not have a
                value per row.
        """
        rows = count_rows(batch, self._dim)
        sizes = even_sizes(rows, min(chunks, rows // self._at_least))
        if len(sizes) == 1:
            return [batch]
        return split_rows(self._values.marked(batch, rows), sizes, self._dim)

    @override
    def merge(self, outputs: Sequence[Any], batch: Any) -> Any:
        """Merge the outputs of all micro-batches into the output of the mini-batch.

        Tensors are concatenated in order along ``output_dim``, those without that dim along dim 0,
        and 0-dim tensors are stacked to shape ``(m,)``. Lists and arrays that were split are joined
        again if layers return them unchanged, and so are lists of strings that layers make, if they
        have a string per row. Other values must be equal for all micro-batches, and are returned
        once.

        Raises:
            ValueError: If the outputs differ in structure, or in a value that must be equal, or do
                not have their rows in the ``dim`` of the input and no ``output_dim`` was given.
        """
        if len(outputs) == 1:
            return outputs[0]
        if not self.dims and are_rows(outputs):
            return concatenated(0, outputs, 0)  # most often
        sizes = partial(self._sizes, batch, len(outputs))
        return merged(outputs, batch, sizes, partial(self._output_dims, batch, len(outputs)))

    @override
    def division(self, microbatches: Sequence[Any]) -> Division:
        return division_of(microbatches, self._dim)

    @override
    def merge_results(self, results: Sequence[Any], batch: Any) -> Any:
        if isinstance(results[0], list):
            return list(chain(*results))
        dims = {0, *(self._dim.values() if isinstance(self._dim, dict) else [self._dim])}
        sizes = even_sizes(count_rows(batch, self._dim), len(results))
        fitting = [k for k in dims if [x.size(k) if x.dim() > k else 0 for x in results] == sizes]
        if len(fitting) > 1:
            raise ValueError(
                "it must be clear in which dim a result of training_step has its rows: got shapes "
                f"{[tuple(x.shape) for x in results]} for micro-batches of {sizes} rows, with "
                f"{self}. Return a list of rows, or write schedule='fill_drain'."
            )
        return torch.cat(list(results), *fitting)

    def _sizes(self, batch: Any, m: int) -> list[int] | None:
        return None if batch is None else even_sizes(count_rows(batch, self._dim), m)

    def _output_dims(
        self, batch: Any, m: int, output: Any, columns: Sequence[Sequence[Any]]
    ) -> list[int]:
        leaves = tree_flatten(output).leaves
        if self._output_dim is not None:
            return _dims_of(output, leaves, self._output_dim)
        if self._dim == 0:
            return [0] * len(columns)
        dims = _dims_of(output, leaves, self._dim, strict=False)
        _check_rows(columns, dims, even_sizes(count_rows(batch, self._dim), m))
        return dims


def division_of(microbatches: Sequence[Any], dim: Dim = 0) -> Division:
    """Return the sizes of micro-batches with the rows of their tensors in ``dim``."""
    tensors = []
    for microbatch in microbatches:
        leaves = tree_flatten(microbatch).leaves
        pairs = zip(leaves, _dims_of(microbatch, leaves, dim), strict=True)
        tensors.append([(leaf, rows) for leaf, rows in pairs if has_rows(leaf)])
    sizes = tuple(x.size(rows) for (x, rows), *_ in tensors)
    widths = {n for x, rows in tensors[0] for k, n in enumerate(x.shape) if k != rows}
    return Division(sizes, frozenset(widths))


def count_rows(batch: Any, dim: Dim = 0) -> int:
    """Return the number of rows of all tensors, or raise a ValueError if they disagree."""
    leaves = tree_flatten(batch).leaves
    dims = _dims_of(batch, leaves, dim)
    sizes = {leaf.size(k) for leaf, k in zip(leaves, dims, strict=True) if has_rows(leaf)}
    if len(sizes) != 1:
        raise ValueError(_no_common_rows(batch, dims))
    return sizes.pop()


def even_sizes(rows: int, chunks: int) -> list[int]:
    """Return the number of rows of each micro-batch, the larger ones first."""
    m = max(1, min(chunks, rows))
    small, larger = divmod(rows, m)
    return [small + 1] * larger + [small] * (m - larger)


def split_rows(batch: Any, sizes: list[int], dim: Dim = 0) -> list[Any]:
    """Split ``batch``, whose lists with an entry per row are marked, into pieces of these sizes."""
    flat = tree_flatten(batch)
    dims = _dims_of(batch, flat.leaves, dim)
    pieces = [_pieces(leaf, sizes, k) for leaf, k in zip(flat.leaves, dims, strict=True)]
    return [tree_unflatten(flat._replace(leaves=list(each))) for each in zip(*pieces, strict=True)]


def has_rows(leaf: Any) -> bool:
    """Return whether a leaf is a tensor with a row per sample; sparse or nested, it is an error."""
    if not isinstance(leaf, Tensor) or is_whole(leaf):
        return False
    if leaf.is_nested:
        raise ValueError(
            "tensors with a row per sample must be dense, so that they can be split: got a nested "
            f"tensor of layout {leaf.layout}. Pad it, with torch.nested.to_padded_tensor(x, 0.0), "
            "and pass the lengths; a layer may make it nested again for its own use."
        )
    if leaf.layout is not torch.strided:
        raise ValueError(
            "tensors with a row per sample must be dense, so that they can be split: got one of "
            f"layout {leaf.layout}. Write whole(tensor) if every micro-batch needs all of it, or "
            "make it dense."
        )
    return leaf.dim() > 0


def _pieces(leaf: Any, sizes: list[int], dim: int) -> Sequence[Any]:
    if has_entries(leaf):
        return pieces_of(leaf, sizes)
    if not has_rows(leaf):
        # The mark of a tensor is recognised in the output.
        marked = whole(leaf) if isinstance(leaf, Tensor) and not is_whole(leaf) else leaf
        return [marked] * len(sizes)
    pieces = leaf.split(sizes, dim)
    # Layers may call view() on tensors that are contiguous in the plain module.
    return [piece.contiguous() for piece in pieces] if dim and leaf.is_contiguous() else pieces


def _check_rows(columns: Sequence[Sequence[Any]], dims: Sequence[int], sizes: list[int]) -> None:
    """Raise unless the rows of the outputs are in ``dims``, and in these only.

    Outputs of shape ``(time, rows)`` and ``(rows, classes)`` may have the same sizes.
    """
    for column, dim in zip(columns, dims, strict=True):
        tensors = [x for x in column if has_rows(x)]
        if len(tensors) < len(sizes):
            continue  # some are marked, or no tensors
        fitting = [
            k
            for k in range(min(x.dim() for x in tensors))
            if all(x.size(k) == size for x, size in zip(tensors, sizes, strict=True))
        ]
        if dim not in fitting or (fitting == [0, 1] and tensors[0].dim() == 2):
            raise ValueError(
                f"outputs must have the rows of their micro-batch in dim {dim}, as the input: got "
                f"shapes {[tuple(x.shape) for x in tensors]} for micro-batches of {sizes} rows. "
                "Say where the rows of outputs are, for example Rows(dim=1, output_dim=0)."
            )


def _no_common_rows(batch: Any, dims: Sequence[int]) -> str:
    named = zip(named_leaves(batch), dims, strict=True)
    tensors = [(name, leaf, dim) for (name, leaf), dim in named if isinstance(leaf, Tensor)]
    shapes = ", ".join(f"input{name} of shape {tuple(leaf.shape)}" for name, leaf, _ in tensors)
    if not any(has_rows(leaf) for _, leaf, _ in tensors):
        return (
            "the pipeline's input must hold a tensor with a batch dimension to split into "
            f"micro-batches: got {shapes or f'no tensor in {type(batch).__name__}'}."
        )
    where = " and ".join(map(str, sorted({dim for _, leaf, dim in tensors if has_rows(leaf)})))
    others = "" if where == "0" else " Rows(dim={...}) gives the dim of single entries."
    return (
        f"all tensors of a batch must have the same size in dim {where}: got {shapes}. Write "
        f"whole(tensor), from lightning_gpipe, for one that every micro-batch needs as a whole."
        f"{others} Pad one that has several values per row, such as the indices of "
        "nn.EmbeddingBag, to the shape (rows, longest)."
    )


def _check_dim(argument: str, dim: Dim) -> None:
    for value in dim.values() if isinstance(dim, dict) else [dim]:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(
                f"{argument} must be an integer, the dim of the rows, or a dict from entries to "
                f"integers: got {dim!r}."
            )
        if value < 0:  # another dim in tensors of other shape
            raise ValueError(f"{argument} must count from 0, the first dim: got {dim!r}.")


def _dims_of(tree: Any, leaves: Sequence[Any], dim: Dim, *, strict: bool = True) -> list[int]:
    """Return the dim of the rows of each leaf of a tree: ``dim``, or 0 for those without that dim.

    ``strict`` raises a ValueError if an entry in ``dim`` does not exist, or has no such dim.
    """
    if dim == 0:
        return [0] * len(leaves)
    if isinstance(dim, int):
        return [_existing(leaf, dim) for leaf in leaves]
    dims = []
    for name, leaf in zip(entries(tree, dim if strict else ()), leaves, strict=True):
        rows = 0 if name is None else dim.get(name, 0)
        if strict and name in dim and isinstance(leaf, Tensor) and leaf.dim() <= rows:
            raise ValueError(
                f"the entry {name!r} must have its rows in dim {rows}: got a tensor of shape "
                f"{tuple(leaf.shape)}."
            )
        dims.append(_existing(leaf, rows))
    return dims


def _existing(leaf: Any, dim: int) -> int:
    return dim if isinstance(leaf, Tensor) and leaf.dim() > dim else 0
