"""Nested inputs and outputs as flat lists of leaves, and back.

A thin door to ``torch.utils._pytree``: what the rest of the package knows of it stands here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree


class Flat(NamedTuple):
    """A tree taken apart: its leaves in order, and the structure that held them.

    Where only the leaves matter, as with gradients, there is no structure.
    """

    leaves: list[Any]
    spec: _pytree.TreeSpec | None = None

    def detached(self) -> Flat:
        """The same with tensors that belong to no graph and require a gradient as these do."""
        return Flat([_detached(leaf) for leaf in self.leaves], self.spec)


def flatten(tree: Any) -> Flat:
    """Take ``tree`` apart."""
    return Flat(*_pytree.tree_flatten(tree))


def unflatten(flat: Flat) -> Any:
    """Put a tree together again."""
    assert flat.spec is not None, "bare leaves make no tree"
    return _pytree.tree_unflatten(flat.leaves, flat.spec)


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """The tree with ``function(tensor)`` in the place of each tensor."""
    return _pytree.tree_map_only(Tensor, function, tree)


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Every leaf with the path that leads to it, such as ``['mask'][0]``; "" for a lone leaf."""
    leaves, _ = _pytree.tree_flatten_with_path(tree)
    return [(_pytree.keystr(path), leaf) for path, leaf in leaves]


def _detached(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.requires_grad:
        return leaf.detach().requires_grad_(torch.is_grad_enabled())
    return leaf
