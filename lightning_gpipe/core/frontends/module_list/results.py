"""What a call returns: its structure, learned from one result, and expected of all later ones.

A placeholder must be given to the user's forward before there is a result. Whether a block returns
a tensor or a tuple, and of what, is seen once for each kind of block; that later results are like
the first is checked whenever the block runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_gpipe.core.data import FlatTree, tree_flatten, tree_unflatten
from lightning_gpipe.core.frontends.module_list.arguments import WHOLE, Path, Reading


@dataclass(frozen=True)
class Given:
    """An argument that is returned: an object that is no tensor, such as a cache."""

    path: Path


@dataclass(frozen=True)
class TensorLeaf:
    """A tensor that is returned.

    Attributes:
        dtype: Its type.
        dims: The number of its dims.
        reading: How many entries of dim 0 belong to a row; None if that is not known.
    """

    dtype: torch.dtype
    dims: int
    reading: Reading | None


@dataclass(frozen=True)
class Constant:
    """A value that is no tensor, the same in every call."""

    value: Any


@dataclass(frozen=True)
class Result:
    """The structure of what a call returns.

    Attributes:
        spec: That of the tree.
        leaves: What its leaves are.
        single: Whether it is one tensor, not in a tuple.
    """

    spec: Any
    leaves: tuple[TensorLeaf | Constant, ...]
    single: bool

    @classmethod
    def of(cls, result: Any, rows: int | None) -> Result:
        """The structure of a result.

        Args:
            result: What the call returned, with :class:`Given` for arguments.
            rows: How many rows it was called with; None if the result need not be cut.
        """
        flat = tree_flatten(result)
        leaves = tuple(_leaf(each, rows) for each in flat.leaves)
        return cls(flat.spec, leaves, isinstance(result, Tensor))

    @cached_property
    def gives(self) -> bool:
        """Whether an argument is among its leaves."""
        constants = (leaf.value for leaf in self.leaves if isinstance(leaf, Constant))
        return any(isinstance(value, Given) for value in constants)

    def tree(self, leaves: Sequence[Any]) -> Any:
        """A result with these leaves."""
        return tree_unflatten(FlatTree(list(leaves), self.spec))

    def flat(self, result: Any) -> list[Any] | None:
        """The leaves of a later result; None if it differs in what is not a tensor."""
        flat = tree_flatten(result)
        if flat.spec is not self.spec and flat.spec != self.spec:
            return None
        for leaf, expected in zip(flat.leaves, self.leaves, strict=True):
            if isinstance(leaf, Tensor) != isinstance(expected, TensorLeaf):
                return None
            if isinstance(expected, Constant) and not _same(leaf, expected.value):
                return None
        return flat.leaves


def with_given(result: Any, objects: Sequence[tuple[Path, Any]]) -> Any:
    """The result with :class:`Given` for the arguments in it that are these objects."""
    if not objects:
        return result
    if type(result) is tuple or type(result) is list:
        return type(result)(with_given(each, objects) for each in result)
    found = (path for path, each in objects if each is result)
    path = next(found, None)
    return result if path is None else Given(path)


def map_given(function: Callable[[Path], Any], leaf: Any) -> Any:
    """The leaf, or ``function(path)`` for an argument."""
    return function(leaf.path) if isinstance(leaf, Given) else leaf


def equal(one: Any, other: Any) -> bool:
    """Whether two results are the same, in every value."""
    (leaves, spec), (others, spec_of_other) = tree_flatten(one), tree_flatten(other)
    return spec == spec_of_other and all(map(_alike, leaves, others))


def _leaf(leaf: Any, rows: int | None) -> TensorLeaf | Constant:
    if not isinstance(leaf, Tensor):
        return Constant(leaf)
    if rows is None:
        return TensorLeaf(leaf.dtype, leaf.dim(), None)
    cut = leaf.dim() > 0 and leaf.size(0) % rows == 0
    return TensorLeaf(leaf.dtype, leaf.dim(), leaf.size(0) // rows if cut else WHOLE)


def _same(value: Any, expected: Any) -> bool:
    return value is expected or (type(value) is type(expected) and bool(value == expected))


def _alike(one: Any, other: Any) -> bool:
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return one is other or (type(one) is type(other) and bool(one == other))
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not (one.dtype.is_floating_point or one.dtype.is_complex):
        return torch.equal(one, other)
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
