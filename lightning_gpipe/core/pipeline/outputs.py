"""Outputs of a program that have no row per sample.

Outputs of micro-batches are concatenated along their rows. A number, such as a loss, or a tensor
for the whole mini-batch, such as a table of position biases, has none: concatenated it would be
something that the plain model does not return. If it is the same for all micro-batches, it is
returned once; otherwise only the model's author knows what the whole mini-batch has there.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from lightning_gpipe.core.plan import Program


def once_or_per_row(
    program: Program, outputs: Sequence[list[Any]], division: Division | None
) -> list[list[Any]]:
    """The outputs, with marks on those that are to be returned once.

    Args:
        program: What made them.
        outputs: For each micro-batch, the values of the program's outputs.
        division: How many rows each micro-batch has, if that is known.

    Raises:
        ValueError: If an output has no rows, and differs between micro-batches. Names its step.
    """
    result = [list(values) for values in outputs]
    for k, number in enumerate(program.outputs):
        flats = [tree_flatten(values[k]) for values in outputs]
        marked = [list(flat.leaves) for flat in flats]
        for at, column in enumerate(zip(*marked, strict=False)):
            if not _lacks_rows(column, division):
                continue
            if not _same(column):
                raise ValueError(_refusal(program.title_of(number), column))
            for leaves, leaf in zip(marked, column, strict=True):
                leaves[at] = whole(leaf)
        for values, leaves, flat in zip(result, marked, flats, strict=True):
            values[k] = tree_unflatten(FlatTree(leaves, flat.spec))
    return result


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
