"""The calls of a program's steps, and the structure of what they return.

It is seen once for each kind of block, for placeholders, and checked in all later results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_gpipe.core.data import FlatTree, tree_flatten, tree_unflatten
from lightning_gpipe.core.frontends.cuts import Cut, same, same_constant
from lightning_gpipe.core.frontends.module_list.tape.arguments import WHOLE, Path, Reading, title


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
    dim: int = 0  # of the rows
    inner: bool = False  # whether each entry of a row follows that of the row before

    @property
    def cut(self) -> Cut:
        return self.reading, self.dim, self.inner


@dataclass(frozen=True)
class Result:
    """The structure of what a call returns; a leaf may also be a constant."""

    spec: Any
    leaves: tuple[Any, ...]
    single: bool  # one tensor, not in a tuple

    @classmethod
    def of(cls, result: Any, rows: int | None, dim: int = 0, inner: bool = False) -> Result:
        """Return the structure of a result; ``rows`` is None if it need not be cut."""
        flat = tree_flatten(result)
        leaves = tuple(_leaf(x, rows, dim, inner) for x in flat.leaves)
        return cls(flat.spec, leaves, isinstance(result, Tensor))

    @cached_property
    def has_arguments(self) -> bool:
        return any(isinstance(leaf, ReturnedArgument) for leaf in self.leaves)

    def tree(self, leaves: Sequence[Any]) -> Any:
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
            if not (is_tensor or same_constant(leaf, expected)):
                return None
        return flat.leaves


class RecordedCall(NamedTuple):
    """The call of a block, or of an operator that the user's forward applies between two blocks.

    ``kind`` is equal for calls that return the same structure for arguments of the same kind;
    ``modules`` are those whose state the call may change.
    """

    run: Callable[..., Any]
    kind: Hashable
    name: str
    line: str
    stage: int
    device: torch.device
    modules: tuple[nn.Module, ...] = ()
    parameters: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} ({self.line})"

    def titles(self, paths: Sequence[Path]) -> str:
        return " and ".join(title(path, self.parameters) for path in paths)


@dataclass
class Knowledge:
    """The knowledge about all calls of a kind.

    ``readings`` say how tensor arguments are cut, where the shape does not; ``filled_objects`` are
    arguments that they fill, such as caches; ``rows`` is the largest number of rows for which it
    holds; ``shapes`` are of results, by those of arguments.
    """

    result: Result
    readings: dict[Path, Reading]
    filled_objects: frozenset[Path] = frozenset()
    rows: float = math.inf
    shapes: dict[Any, list[torch.Size | None]] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return all(getattr(leaf, "reading", 0) is not None for leaf in self.result.leaves)


def checked_result(
    name: str, expected: Result, objects: Sequence[tuple[Path, Any]], result: Any
) -> Any:
    """Return the tensor that a call returned in a stage, or the leaves of its tree."""
    if expected.single and type(result) is Tensor:
        return result
    result = with_returned_arguments(result, objects)
    leaves = expected.flat(result)
    if leaves is None:
        raise RuntimeError(
            f"{name} must return values of the same kind as the first block like it: "
            f"expected {expected}, got {Result.of(result, None)}. The user's forward has "
            "gone on with the former. Let all blocks of a class return the same structure, and "
            "put numbers that depend on the input into tensors."
        )
    return leaves[0] if expected.single else leaves


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
    return spec == spec_of_other and all(map(same, leaves, others))


def _leaf(leaf: Any, rows: int | None, dim: int, inner: bool) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if rows is None:
        return TensorLeaf(leaf.dtype, leaf.dim(), None)
    cut = leaf.dim() > dim and leaf.size(dim) % rows == 0
    if not cut:
        return TensorLeaf(leaf.dtype, leaf.dim(), WHOLE)
    return TensorLeaf(leaf.dtype, leaf.dim(), leaf.size(dim) // rows, dim, inner)
