"""Compares the arguments of a call with those of a recorded one, by a function made once of these.

Most often a forward calls each of its blocks with what the forward before did. A comparison of
trees, container by container, takes longer than a function for each tree that knows its shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_gpipe.core.frontends.module_list.tape.arguments import Reading, is_named
from lightning_gpipe.core.frontends.module_list.tape.placeholder import Placeholder
from lightning_gpipe.core.programs import Value


@dataclass(frozen=True)
class OutsideTensor:
    """Stands for a tensor from outside in the arguments of a recorded call."""

    number: int  # of the value that the step gets
    source: int  # the number of the input: another one if the stage must reshape it
    reading: Reading
    learned_reading: Reading | None  # None if the shape tells
    dtype: torch.dtype
    dims: int

    @property
    def key(self) -> tuple[int, Reading | None]:
        """Equal for those that accept the same tensors."""
        return self.source, self.learned_reading

    def fits(self, tensor: Tensor) -> bool:
        """Return whether a tensor is of the same type and number of dims."""
        return tensor.dtype is self.dtype and tensor.dim() == self.dims


class AcceptedTensors(Protocol):
    """The tensors from outside of a forward."""

    accepted: dict[tuple[int, Reading | None], Tensor]

    def is_as(self, tensor: Tensor, expected: OutsideTensor) -> bool:
        """Return whether a tensor that was not accepted before is as expected."""


class Follower(Protocol):
    """The recording of a forward that follows a tape."""

    @property
    def outsides(self) -> AcceptedTensors:
        """The tensors from outside among the arguments of its calls."""


Pattern = Callable[[Any, Follower], bool]


def pattern_of(tree: Any) -> Pattern:
    """Return a function that tells whether the arguments of a call are those of a recorded one.

    These have a Value for a placeholder, and an :class:`OutsideTensor` for a tensor from outside.
    """
    kind = type(tree)
    if kind is Value:
        return _placeholder(tree.number)
    if kind is OutsideTensor:
        return _outside(tree)
    if kind is dict:
        return _dict(tuple(tree), [pattern_of(value) for value in tree.values()])
    if kind is tuple or kind is list or is_named(tree):
        return _sequence(kind, [pattern_of(item) for item in tree])
    return _constant(tree)


def is_plain(value: Any) -> bool:
    """Return whether two equal constants of this type mean the same."""
    if type(value) is slice:
        return all(map(is_plain, (value.start, value.stop, value.step)))
    return type(value) in _PLAIN


_PLAIN = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}
)


def _placeholder(number: int) -> Pattern:
    def fits(leaf: Any, follower: Any) -> bool:
        return type(leaf) is Placeholder and leaf.number == number and leaf.recording is follower

    return fits


def _outside(expected: OutsideTensor) -> Pattern:
    key = expected.key

    def fits(leaf: Any, follower: Follower) -> bool:
        if not isinstance(leaf, Tensor) or type(leaf) is Placeholder:
            return False
        # Most often all blocks get the same ones.
        outsides = follower.outsides
        return outsides.accepted.get(key) is leaf or outsides.is_as(leaf, expected)

    return fits


def _constant(value: Any) -> Pattern:
    plain = is_plain(value)

    def fits(leaf: Any, follower: Follower) -> bool:
        return leaf is value or (
            plain and type(leaf) is type(value) and is_plain(leaf) and bool(leaf == value)
        )

    return fits


def _sequence(kind: Any, patterns: list[Pattern]) -> Pattern:
    n = len(patterns)

    def fits(items: Any, follower: Follower) -> bool:
        if type(items) is not kind or len(items) != n:
            return False
        for pattern, item in zip(patterns, items, strict=True):  # noqa: SIM110 (a generator is slow)
            if not pattern(item, follower):
                return False
        return True

    return fits


def _dict(keys: tuple[Any, ...], patterns: list[Pattern]) -> Pattern:
    if not keys:
        return _is_empty_dict

    def fits(items: Any, follower: Follower) -> bool:
        if type(items) is not dict or tuple(items) != keys:
            return False
        for pattern, item in zip(patterns, items.values(), strict=True):
            if not pattern(item, follower):
                return False
        return True

    return fits


def _is_empty_dict(items: Any, follower: Follower) -> bool:
    return type(items) is dict and not items
