"""Outputs of a program that have no row per sample.

A number, such as a loss, or a tensor for the whole mini-batch, such as a table of position biases,
cannot be concatenated along rows. If it is the same for all micro-batches, it is returned once;
otherwise only the model's author knows what the whole mini-batch has there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lightning_gpipe.core.data import (
    Division,
    FlatTree,
    is_whole,
    same_value,
    tree_flatten,
    tree_unflatten,
    whole,
)


def once_or_per_row(
    values: Sequence[Any], title: Callable[[], str], division: Division | None
) -> Sequence[Any]:
    """Mark values that are to be returned once; raise ValueError if they lack rows and differ."""
    rows = (x.size(0) if type(x) is Tensor and x.dim() else None for x in values)
    if division is not None and tuple(rows) == division.sizes:
        return values  # most often
    flats = list(map(tree_flatten, values))
    columns = list(zip(*(flat.leaves for flat in flats), strict=False))
    lacking = [_lacks_rows(column, division) for column in columns]
    if not any(lacking):
        return values
    marked = [
        _marked(column, title) if lacks else column
        for column, lacks in zip(columns, lacking, strict=True)
    ]
    trees = zip(zip(*marked, strict=True), flats, strict=True)
    return [tree_unflatten(FlatTree(list(leaves), flat.spec)) for leaves, flat in trees]


def _marked(column: Sequence[Tensor], title: Callable[[], str]) -> Sequence[Tensor]:
    if not _same(column):
        shapes = ", ".join(str(tuple(x.shape)) for x in column)
        raise ValueError(
            "what leaves a pipeline must have a row per sample in dim 0, or be the same for all "
            f"micro-batches: got shapes {shapes} from {title()}. Compute it after the pipeline, "
            "as a forward does if module= is the path of the blocks in it, hand a loss out by "
            "loss_term(), from lightning_gpipe, or write chunks=1. If nothing uses it, let module= "
            "be the path of the whole model, not of its blocks."
        )
    return list(map(whole, column))


def _lacks_rows(column: Sequence[Any], division: Division | None) -> bool:
    """Return True if dim 0 of a tensor cannot be the rows, or a multiple of them."""
    if not all(isinstance(x, Tensor) for x in column):
        return False
    if any(map(is_whole, column)):
        return all(map(is_whole, column))
    if any(x.dim() == 0 for x in column):
        return True
    if division is None or any(x.is_nested for x in column):
        return False
    first, rows = column[0].size(0), division.sizes[0]
    return first % rows != 0 or any(
        x.size(0) * rows != first * size for x, size in zip(column, division.sizes, strict=True)
    )


def _same(column: Sequence[Tensor]) -> bool:
    """Return True if all are equal, and no gradient would have to be divided among them.

    The gradient of one that a layer or a block marks is that of the first micro-batch.
    """
    if any(x.requires_grad and not is_whole(x) for x in column):
        return False
    return all(same_value(x, column[0]) for x in column)
