"""The dim of the rows in a tensor: dim 0, unless the user says otherwise.

Without ``batch_first=True`` PyTorch's layers take sequences as ``(time, rows, ...)``. Other tensors
of such a batch differ: labels ``(rows,)`` have fewer dims, and a key padding mask is ``(rows,
time)`` even there. So the dim can be set for all tensors or for single entries.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_gpipe.core.data.pytree import entries, tree_flatten

Dim = int | dict[int | str, int]  # of all tensors, or by entry; 0 for the other entries


def check_dim(argument: str, dim: Dim) -> None:
    """Raise unless ``dim`` is an integer or a dict of integers, all of them at least 0."""
    for value in dim.values() if isinstance(dim, dict) else [dim]:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(
                f"{argument} must be an integer, the dim of the rows, or a dict from entries to "
                f"integers: got {dim!r}."
            )
        if value < 0:  # another dim in tensors of other shape
            raise ValueError(f"{argument} must count from 0, the first dim: got {dim!r}.")


def dims_of(tree: Any, dim: Dim, *, strict: bool = True) -> list[int]:
    """Return the dim of each leaf's rows: ``dim``, or 0 for leaves without that dim.

    ``strict`` raises a ValueError if an entry in ``dim`` does not exist, or has no such dim.
    """
    leaves = tree_flatten(tree).leaves
    if isinstance(dim, int):
        return [_existing(leaf, dim) for leaf in leaves]
    names = entries(tree)
    if strict and (missing := [entry for entry in dim if entry not in names]):
        raise ValueError(f"the entries {missing} must exist: got {list(dict.fromkeys(names))}.")
    dims = []
    for name, leaf in zip(names, leaves, strict=True):
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
