"""Cuts: where a tensor has the rows of a mini-batch; some of these rows, and comparisons.

The rows may be in any dim. A dim with several entries for each row, as ``x.view(rows * heads, -1)``
has, holds those of a row side by side, or, ``inner``, the first of all rows, then the second ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Cut = tuple[int | None, int, bool]  # the entries per row, 0 without rows; their dim; inner

OTHERS = 3  # rows of beside_others() that are no rows of its argument
_FAR = 1024.0  # times the first row are others


def few_of(tensor: Tensor, cut: Cut, rows: int, few: int | Sequence[int] | None) -> Tensor:
    """Return ``few`` rows of a tensor, by number or indices; all if None, or if it is not cut."""
    tensor, (entries, dim, inner) = tensor.detach(), cut
    if not entries or few is None:
        return tensor
    # The last ones: a block may take the first entries of a table, and must not get the same ones
    # of a table that is cut.
    chosen = [(k - few) % rows for k in range(few)] if isinstance(few, int) else few
    by_rows = tensor.unflatten(dim, (-1, rows) if inner else (rows, -1))
    index = torch.tensor(chosen, device=tensor.device)
    return by_rows.index_select(dim + inner, index).flatten(dim, dim + 1)


def beside_others(leaf: Tensor, cut: Cut, rows: int, *, far: bool) -> Tensor:
    """The rows, one place further on, between others that are far from them or equal to one."""
    _, dim, inner = cut
    by_rows = leaf.detach().unflatten(dim, (-1, rows) if inner else (rows, -1))
    before = after = by_rows.narrow(dim + inner, 0, 1)
    if far and leaf.dtype == torch.bool:
        before = after = ~before
    elif far and (leaf.is_floating_point() or leaf.is_complex()):
        first = torch.where(before == 0, 1, before)  # zeros would not change a sum
        before, after = _FAR * first, -_FAR / 4 * first  # one is positive, and so is their sum
    elif far:  # integers may be indices: zero, and the largest ones, which change a sum
        before = torch.zeros_like(before)
        after = by_rows.long().amax(dim + inner, keepdim=True).to(leaf.dtype)
    index = torch.tensor([0, *range(by_rows.size(dim + inner)), 0, 0], device=leaf.device)
    beside = by_rows.index_select(dim + inner, index)  # cat would cast under autocast
    beside.narrow(dim + inner, 0, 1).copy_(before)
    beside.narrow(dim + inner, len(index) - 2, 2).copy_(after)
    return beside.flatten(dim, dim + 1)


def scaled(shape: torch.Size, cut: Cut, few: int, rows: int) -> torch.Size:
    """Return the shape with all rows of a tensor that has this one with a few."""
    entries, dim, _ = cut
    if not entries:
        return shape
    return torch.Size([*shape[:dim], shape[dim] // few * rows, *shape[dim + 1 :]])


def same(one: Any, other: Any, *, close: bool = False) -> bool:
    """Return whether two leaves are the same; tensors up to the order of sums if ``close``."""
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return same_constant(one, other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.is_meta:
        return True
    if not (one.dtype.is_floating_point or one.dtype.is_complex):
        return torch.equal(one, other)
    tolerance = torch.finfo(one.dtype).eps ** 0.5 if close else 0.0
    largest = float(other.detach().abs().nan_to_num(0, 0, 0).max()) if other.numel() else 0.0
    return torch.allclose(one, other, tolerance, tolerance * largest, equal_nan=True)


def same_constant(one: Any, other: Any) -> bool:
    """Return whether two values are one object, or equal and of one type."""
    return one is other or (type(one) is type(other) and bool(one == other))
