"""Micro-batches of consecutive rows, the default.

Other libraries split each tensor separately and pair up the pieces, so a tensor with fewer rows
silently drops rows of the others. Here all tensors of a batch must have the same number of rows,
and a mini-batch of 10 rows in 4 chunks becomes 3, 3, 2 and 2 rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_gpipe.core.data.marks import is_whole, whole
from lightning_gpipe.core.data.microbatch.interface import MicroBatching
from lightning_gpipe.core.data.pytree import FlatTree, named_leaves, tree_flatten, tree_unflatten


class Rows(MicroBatching):
    """Splits along dim 0 as evenly as possible, and concatenates.

    Args:
        at_least: The smallest number of rows in a micro-batch, unless the whole batch has fewer.
    """

    def __init__(self, at_least: int = 1) -> None:
        if at_least < 1:
            raise ValueError(f"at_least must be 1 or more, a number of rows: got {at_least}.")
        self._at_least = at_least

    def __repr__(self) -> str:
        return f"Rows(at_least={self._at_least})"

    @override
    def split(self, batch: Any, chunks: int) -> list[Any]:
        """Split ``batch`` into at most ``chunks`` micro-batches of the same structure.

        Tensors of shape ``(rows, ...)`` are split along dim 0, the larger pieces first; all must
        have the same number of rows. Everything else goes to every micro-batch: 0-dim tensors,
        tensors marked by :func:`~lightning_gpipe.core.data.marks.whole`, strings, None, numbers. A
        batch of fewer rows than chunks makes fewer micro-batches.

        Args:
            batch: Any pytree with at least one tensor that has a batch dimension.
            chunks: The number of micro-batches asked for, at least 1.

        Raises:
            ValueError: If no tensor has a batch dimension, the tensors disagree on its size, or one
                cannot be split because it is sparse or nested.
        """
        rows = count_rows(batch)
        return split_rows(batch, even_sizes(rows, min(chunks, rows // self._at_least)))

    @override
    def merge(self, outputs: Sequence[Any], batch: Any) -> Any:
        """Merge the outputs of all micro-batches into the output of the mini-batch.

        Tensors are concatenated along dim 0 in order, 0-dim tensors are stacked to shape ``(m,)``.
        Marked tensors and values other than tensors must be equal for all micro-batches, and are
        returned once.

        Raises:
            ValueError: If the outputs differ in structure, or in a value that must be equal.
        """
        if len(outputs) == 1:
            return outputs[0]
        flat = [tree_flatten(output) for output in outputs]
        specs = [spec for _, spec in flat]
        if any(spec != specs[0] for spec in specs):
            raise ValueError(
                "the outputs of all micro-batches must have one structure: got "
                + ", ".join(f"{spec} for micro-batch {i}" for i, spec in enumerate(specs))
            )
        columns = zip(*(leaves for leaves, _ in flat), strict=True)
        merged = [_merge_leaf(k, column) for k, column in enumerate(columns)]
        return tree_unflatten(FlatTree(merged, specs[0]))


def count_rows(batch: Any) -> int:
    """The number of rows that all tensors of ``batch`` have.

    Raises:
        ValueError: If they disagree, or no tensor has rows.
    """
    rows = {leaf.size(0) for leaf in tree_flatten(batch).leaves if has_rows(leaf)}
    if len(rows) != 1:
        raise ValueError(_no_common_rows(batch))
    return rows.pop()


def even_sizes(rows: int, chunks: int) -> list[int]:
    """The number of rows of each micro-batch, the larger ones first."""
    m = max(1, min(chunks, rows))
    small, larger = divmod(rows, m)
    return [small + 1] * larger + [small] * (m - larger)


def split_rows(batch: Any, sizes: list[int]) -> list[Any]:
    """Split ``batch`` into micro-batches of consecutive rows, as many as each size says."""
    if len(sizes) == 1:
        return [batch]
    leaves, spec = tree_flatten(batch)
    pieces = [
        leaf.split(sizes) if has_rows(leaf) else [_unsplit(leaf)] * len(sizes) for leaf in leaves
    ]
    return [tree_unflatten(FlatTree(list(piece), spec)) for piece in zip(*pieces, strict=True)]


def has_rows(leaf: Any) -> bool:
    """Whether this is a tensor with a row per sample.

    Raises:
        ValueError: If it cannot be split because it is sparse or nested.
    """
    if not isinstance(leaf, Tensor) or is_whole(leaf):
        return False
    if leaf.layout is not torch.strided or leaf.is_nested:
        raise ValueError(
            "tensors with a row per sample must be dense, so that they can be split: got one of "
            f"layout {leaf.layout}. Write whole(tensor) if every micro-batch needs all of it, or "
            "make it dense."
        )
    return leaf.dim() > 0


def _unsplit(leaf: Any) -> Any:
    """The leaf for every micro-batch; a tensor is marked, so that it is recognised as output."""
    return whole(leaf) if isinstance(leaf, Tensor) and not is_whole(leaf) else leaf


def _merge_leaf(k: int, values: Sequence[Any]) -> Any:
    tensors = [value for value in values if isinstance(value, Tensor)]
    if len(tensors) == len(values) and not all(map(is_whole, tensors)):
        return torch.stack(tensors) if tensors[0].dim() == 0 else torch.cat(tensors)
    if not all(_same(value, values[0]) for value in values):
        raise ValueError(
            "an output without a row per sample, one that is not a tensor or is marked by whole(), "
            f"must be the same for all micro-batches: got {list(values)} for leaf {k}. Return it "
            "as a tensor with a row per sample."
        )
    return values[0]


def _same(value: Any, other: Any) -> bool:
    if value is other:
        return True
    if type(value) is not type(other):
        return False
    if isinstance(value, Tensor):
        if not is_whole(value) or value.layout != other.layout or value.shape != other.shape:
            return False
        return all(map(_equal, _dense_parts(value), _dense_parts(other)))
    equal = value == other
    return bool(equal.all()) if hasattr(equal, "all") else bool(equal)  # arrays compare by element


def _equal(tensor: Tensor, other: Tensor) -> bool:
    if (tensor.data_ptr(), tensor.stride()) == (other.data_ptr(), other.stride()):
        return tensor.shape == other.shape  # the same memory: nothing to compare
    there = tensor.to(other.device)
    if not there.dtype.is_floating_point:
        return torch.equal(there, other)
    return torch.allclose(there, other, rtol=0, atol=0, equal_nan=True)


def _dense_parts(tensor: Tensor) -> list[Tensor]:
    """Dense tensors that are equal if the tensors that they represent are."""
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return [tensor.indices(), tensor.values()]
    return [tensor if tensor.layout is torch.strided else tensor.to_dense()]


def _no_common_rows(batch: Any) -> str:
    tensors = [(name, leaf) for name, leaf in named_leaves(batch) if isinstance(leaf, Tensor)]
    found = ", ".join(f"input{name} of shape {tuple(leaf.shape)}" for name, leaf in tensors)
    if not any(has_rows(leaf) for _, leaf in tensors):
        return (
            "the pipeline's input must hold a tensor with a batch dimension to split into "
            f"micro-batches: got {found or f'no tensor in {type(batch).__name__}'}."
        )
    return (
        f"all tensors of a batch must have the same size in dim 0: got {found}. Write "
        "whole(tensor), from lightning_gpipe, for one that every micro-batch needs as a whole."
    )
