"""Outputs of a program that have no row per sample.

Outputs of micro-batches are concatenated along their rows. A number, such as a loss, or a tensor
for the whole mini-batch, such as a table of position biases, has none: concatenated it would be
something that the plain model does not return. If it is the same for all micro-batches, it is
returned once; otherwise only the model's author knows what the whole mini-batch has there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gpipe.core.data import (
    Division,
    FlatTree,
    is_whole,
    tree_flatten,
    tree_unflatten,
    whole,
)


def once_or_per_row(
    values: Sequence[Any], title: Callable[[], str], division: Division | None
) -> Sequence[Any]:
    """The values of one output, with marks on those that are to be returned once.

    Args:
        values: Its value for each micro-batch.
        title: Returns what errors call it.
        division: How many rows each micro-batch has, if that is known.

    Raises:
        ValueError: If it has no rows, and differs between micro-batches.
    """
    if division is not None and tuple(map(_rows_of, values)) == division.sizes:
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


def _rows_of(value: Any) -> int | None:
    """The size of dim 0; None for what is no tensor, or has none."""
    return value.size(0) if type(value) is Tensor and value.dim() else None


def _marked(column: Sequence[Tensor], title: Callable[[], str]) -> Sequence[Tensor]:
    """The tensors, marked as one that is returned once."""
    if not _same(column):
        raise ValueError(_refusal(title(), column))
    return list(map(whole, column))


def _lacks_rows(column: Sequence[Any], division: Division | None) -> bool:
    """Whether a leaf is a tensor whose dim 0 cannot be that of the rows, or a multiple of it."""
    if not all(isinstance(x, Tensor) and not is_whole(x) for x in column):
        return False
    if any(x.dim() == 0 for x in column):
        return True
    if division is None or any(x.is_nested for x in column):
        return False
    first, rows = column[0].size(0), division.sizes[0]
    return first % rows != 0 or any(
        x.size(0) * rows != first * size for x, size in zip(column, division.sizes, strict=True)
    )


def _same(column: Sequence[Tensor]) -> bool:
    """Whether it is the same in all micro-batches, and no gradient would have to be shared out."""
    if any(x.requires_grad for x in column):
        return False
    return all(x.shape == column[0].shape and torch.equal(x, column[0]) for x in column)


def _refusal(title: str, column: Sequence[Tensor]) -> str:
    shapes = ", ".join(str(tuple(x.shape)) for x in column)
    return (
        "what leaves a pipeline must have a row per sample, or be the same for all micro-batches: "
        f"got shapes {shapes} from {title}. Compute it after the pipeline, hand a loss out by "
        "loss_term(), from lightning_gpipe, or write chunks=1."
    )
