"""In which dim of a tensor its rows are: dim 0, unless the user says otherwise.

The layers of PyTorch that have no ``batch_first=True`` take sequences as ``(time, rows, ...)``.
Other tensors of such a batch differ: labels ``(rows,)`` have fewer dims, and a key padding mask is
``(rows, time)`` even there. So a dim can be given for all tensors or for single entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_gpipe.core.data.pytree import entries, tree_flatten

Dim = int | dict[int | str, int]  # of all tensors, or by entry; 0 for the other entries


def check_dim(argument: str, dim: Dim) -> None:
    """Raise if ``dim`` is not the dim of the rows, or one for each of some entries.

    Raises:
        TypeError: If it is neither an integer nor a dict of integers.
        ValueError: If it counts from the end, which is another dim for tensors of other shape.
    """
    for each in dim.values() if isinstance(dim, dict) else [dim]:
        if isinstance(each, bool) or not isinstance(each, int):
            raise TypeError(
                f"{argument} must be an integer, the dim of the rows, or a dict from entries to "
                f"integers: got {dim!r}."
            )
        if each < 0:
            raise ValueError(f"{argument} must count from 0, the first dim: got {dim!r}.")


def dims_of(tree: Any, dim: Dim, *, strict: bool = True) -> list[int]:
    """For each leaf the dim of its rows: ``dim``, or 0 for leaves that do not have that dim.

    Args:
        tree: A mini-batch, a micro-batch or an output.
        dim: The dim of all tensors, or of the tensors in some entries.
        strict: Whether each entry in ``dim`` must exist, with tensors that have the dim.

    Raises:
        ValueError: If one does not.
    """
    leaves = tree_flatten(tree).leaves
    if isinstance(dim, int):
        return [_existing(leaf, dim) for leaf in leaves]
    names = entries(tree)
    if strict:
        _check_entries(names, leaves, dim)
    return [
        _existing(leaf, 0 if name is None else dim.get(name, 0))
        for name, leaf in zip(names, leaves, strict=True)
    ]


def _existing(leaf: Any, dim: int) -> int:
    return dim if isinstance(leaf, Tensor) and leaf.dim() > dim else 0


def _check_entries(
    names: Sequence[int | str | None], leaves: Sequence[Any], dim: dict[int | str, int]
) -> None:
    found = list(dict.fromkeys(names))
    if missing := [entry for entry in dim if entry not in names]:
        raise ValueError(f"the entries {missing} must exist: got {found}.")
    for name, leaf in zip(names, leaves, strict=True):
        if name in dim and isinstance(leaf, Tensor) and leaf.dim() <= dim[name]:
            raise ValueError(
                f"the entry {name!r} must have its rows in dim {dim[name]}: got a tensor of shape "
                f"{tuple(leaf.shape)}."
            )
