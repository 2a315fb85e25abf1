"""The structure of what a call returns, learned from one result and checked in all later ones.

The user's forward gets placeholders before there is a result. Whether a block returns a tensor or a
tuple, and of what, is seen once for each kind of block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_gpipe.core.data import FlatTree, tree_flatten, tree_unflatten
from lightning_gpipe.core.frontends.module_list.tape.arguments import WHOLE, Path, Reading


@dataclass(frozen=True)
class ReturnedArgument:
    """Stands for an argument that is returned: an object that is no tensor, such as a cache."""

    path: Path


@dataclass(frozen=True)
class TensorLeaf:
    """A tensor that is returned."""

    dtype: torch.dtype
    dims: int
    reading: Reading | None  # None if it is not known whether it has rows


@dataclass(frozen=True)
class Result:
    """The structure of what a call returns.

    A leaf is a :class:`TensorLeaf`, a :class:`ReturnedArgument`, or a constant that is the same in
    every call.
    """

    spec: Any
    leaves: tuple[Any, ...]
    single: bool  # one tensor, not in a tuple

    @classmethod
    def of(cls, result: Any, rows: int | None) -> Result:
        """Return the structure of a result; ``rows`` is None if it need not be cut."""
        flat = tree_flatten(result)
        leaves = tuple(_tensor_leaf(x, rows) if isinstance(x, Tensor) else x for x in flat.leaves)
        return cls(flat.spec, leaves, isinstance(result, Tensor))

    @cached_property
    def has_arguments(self) -> bool:
        """True if an argument is among its leaves."""
        return any(isinstance(leaf, ReturnedArgument) for leaf in self.leaves)

    def tree(self, leaves: Sequence[Any]) -> Any:
        """Return a result with these leaves."""
        return tree_unflatten(FlatTree(list(leaves), self.spec))

    def flat(self, result: Any) -> list[Any] | None:
        """Return the leaves of a later result; None if it differs in what is not a tensor."""
        flat = tree_flatten(result)
        if flat.spec is not self.spec and flat.spec != self.spec:
            return None
        for leaf, expected in zip(flat.leaves, self.leaves, strict=True):
            is_tensor = isinstance(leaf, Tensor)
            if is_tensor != isinstance(expected, TensorLeaf):
                return None
            if not is_tensor and not _same_constant(leaf, expected):
                return None
        return flat.leaves


def with_returned_arguments(result: Any, objects: Sequence[tuple[Path, Any]]) -> Any:
    """Return the result with a :class:`ReturnedArgument` for each of these objects in it."""
    if not objects:
        return result
    if type(result) is tuple or type(result) is list:
        return type(result)(with_returned_arguments(item, objects) for item in result)
    path = next((path for path, value in objects if value is result), None)
    return result if path is None else ReturnedArgument(path)


def equal(one: Any, other: Any) -> bool:
    """Return whether two results are the same, in every value."""
    (leaves, spec), (others, spec_of_other) = tree_flatten(one), tree_flatten(other)
    return spec == spec_of_other and all(map(_same, leaves, others))


def _tensor_leaf(tensor: Tensor, rows: int | None) -> TensorLeaf:
    if rows is None:
        return TensorLeaf(tensor.dtype, tensor.dim(), None)
    cut = tensor.dim() > 0 and tensor.size(0) % rows == 0
    return TensorLeaf(tensor.dtype, tensor.dim(), tensor.size(0) // rows if cut else WHOLE)


def _same(one: Any, other: Any) -> bool:
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return _same_constant(one, other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not (one.dtype.is_floating_point or one.dtype.is_complex):
        return torch.equal(one, other)
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _same_constant(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and bool(one == other))
