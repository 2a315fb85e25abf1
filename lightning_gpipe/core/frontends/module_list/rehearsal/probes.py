"""Probes of an operator between blocks: where its results have the rows, if it keeps them apart.

It runs on a few rows that all differ, and on others of them, none of which is in all probes or in
the order of all; what is the same for two and for three rows may not be for five. What draws random
numbers draws the same for each place, so that one row after the other is replaced by another one.
As a few rows may have nothing above a threshold, or all, what has no rows must be the same for
zeros and ones, too. And all rows must give the shapes that few let expect, unlike with ``x[:4]``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from lightning_gpipe.core.frontends.cuts import Cut, few_of, same, scaled
from lightning_gpipe.core.frontends.module_list.tape.arguments import WHOLE
from lightning_gpipe.core.frontends.module_list.tape.calls import TensorLeaf

Probe = Sequence[int]  # the indices of rows

PROBED = 3  # the rows that all differ
_ALL = (0, 1, 2)
_OTHERS = (1, 0), (2, 1), (0, 2), (1, 2, 0, 2, 1)
_REPLACED = (1, 1, 2), (0, 2, 2), (0, 1, 0)


def located(
    leaves: Sequence[Any],
    run: Callable[..., list[Any]],
    shapes: Callable[[], list[Any]],
    rows: int,
    *,
    draws: bool,
) -> Sequence[Any] | None:
    """Return the leaves of a result with the dims of their rows; None if it mixes rows.

    ``run`` returns their values for a probe, and optionally a value of all elements; ``shapes``
    returns them for all ``rows``, without values.
    """
    probes = _REPLACED if draws else _OTHERS
    try:
        full, *others = (run(probe) for probe in (_ALL, *probes))
        columns = zip(leaves, full, *others, strict=True)
        found = [_leaf_with_rows(leaf, values, probes) for leaf, *values in columns]
    except Exception:
        return None
    if any(leaf is None and before is not None for leaf, before in zip(found, leaves, strict=True)):
        return None
    whole = [k for k, leaf in enumerate(found) if isinstance(leaf, TensorLeaf) and not leaf.reading]
    for fill in (0, 1) if whole else ():
        try:
            filled = run(_ALL, fill)
        except Exception:
            return None
        if not all(same(filled[k], full[k], close=True) for k in whole):
            return None
    with suppress(Exception):  # it needs values
        expected = [
            scaled(x.shape, leaf.cut, PROBED, rows) if isinstance(leaf, TensorLeaf) else None
            for x, leaf in zip(full, found, strict=True)
        ]
        if [x.shape if isinstance(x, Tensor) else None for x in shapes()] != expected:
            return None
    return found


def with_different_rows(tensor: Tensor) -> Tensor:
    """Return a tensor of which all rows differ, if its elements are no integers."""
    if not tensor.is_floating_point():
        return tensor
    noise = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(0))
    return tensor + (noise / 4).to(tensor)


def _leaf_with_rows(leaf: Any, values: Sequence[Any], probes: Sequence[Sequence[int]]) -> Any:
    """Return a leaf with the dim of its rows; None if probes show that rows depend on others."""
    full, *others = values
    if not isinstance(leaf, TensorLeaf):
        return leaf
    if all(same(full, x, close=True) for x in others):  # drawn values may depend on shapes only
        return leaf if probes is _REPLACED else replace(leaf, reading=WHOLE)
    for dim, inner in product(range(full.dim()), (False, True)):
        cut = full.size(dim) // PROBED, dim, inner
        if full.size(dim) % PROBED == 0 and all(
            _has_rows(x, full, cut, probe) for x, probe in zip(others, probes, strict=True)
        ):
            return TensorLeaf(leaf.dtype, leaf.dims, *cut)
    return None


def _has_rows(result: Tensor, full: Tensor, cut: Cut, probe: Sequence[int]) -> bool:
    """Return whether the rows of a probe have the results that they have among all rows."""
    if len(probe) != PROBED:
        return same(few_of(full, cut, PROBED, probe), result, close=True)
    same_rows = [k for k, row in enumerate(probe) if k == row]
    some, others = (few_of(x, cut, PROBED, same_rows) for x in (full, result))
    return same(some, others, close=True)
