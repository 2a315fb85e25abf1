"""Whether a call is given what a recorded one was: a function, made once of that one's arguments.

Every forward gives each of its blocks something, and most often what the forward before did. To
compare that with the recorded arguments, container by container, takes longer than to do it with a
function for each of them that knows what it has to find.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from lightning_gpipe.core.frontends.module_list.arguments import Reading, is_named
from lightning_gpipe.core.frontends.module_list.expected import Outside, same_constant
from lightning_gpipe.core.frontends.module_list.placeholder import Placeholder
from lightning_gpipe.core.plan import Value


class Accepting(Protocol):
    """The tensors from outside of a forward."""

    accepted: dict[tuple[int, Reading | None], Tensor]

    def is_as(self, tensor: Tensor, expected: Outside) -> bool:
        """Whether a tensor that was not accepted before is as expected."""


class Follower(Protocol):
    """The recording of a forward that follows a tape."""

    @property
    def outsides(self) -> Accepting:
        """The tensors from outside that its calls were given."""


Pattern = Callable[[Any, Follower], bool]


def pattern_of(tree: Any) -> Pattern:
    """A function that tells whether what a call of a forward is given is that of a recorded one.

    Args:
        tree: The arguments of the recorded call: a Value for a placeholder, an :class:`Outside` for
            a tensor from outside, constants, and containers of them.
    """
    kind = type(tree)
    if kind is Value:
        return _placeholder(tree.number)
    if kind is Outside:
        return _outside(tree)
    if kind is dict:
        return _dict(tuple(tree), [pattern_of(each) for each in tree.values()])
    if kind is tuple or kind is list or is_named(tree):
        return _sequence(kind, [pattern_of(each) for each in tree])
    return _constant(tree)


def _placeholder(number: int) -> Pattern:
    def fits(leaf: Any, follower: Any) -> bool:
        return type(leaf) is Placeholder and leaf.number == number and leaf.recording is follower

    return fits


def _outside(expected: Outside) -> Pattern:
    key = expected.key

    def fits(leaf: Any, follower: Follower) -> bool:
        if not isinstance(leaf, Tensor) or type(leaf) is Placeholder:
            return False
        # Most often all blocks are given the same ones.
        outsides = follower.outsides
        return outsides.accepted.get(key) is leaf or outsides.is_as(leaf, expected)

    return fits


def _constant(value: Any) -> Pattern:
    def fits(leaf: Any, follower: Follower) -> bool:
        return leaf is value or same_constant(leaf, value)

    return fits


def _sequence(kind: Any, patterns: list[Pattern]) -> Pattern:
    n = len(patterns)

    def fits(found: Any, follower: Follower) -> bool:
        if type(found) is not kind or len(found) != n:
            return False
        for pattern, each in zip(patterns, found, strict=True):  # noqa: SIM110 (a generator is slow)
            if not pattern(each, follower):
                return False
        return True

    return fits


def _dict(keys: tuple[Any, ...], patterns: list[Pattern]) -> Pattern:
    if not keys:
        return _is_empty_dict

    def fits(found: Any, follower: Follower) -> bool:
        if type(found) is not dict or tuple(found) != keys:
            return False
        for pattern, each in zip(patterns, found.values(), strict=True):
            if not pattern(each, follower):
                return False
        return True

    return fits


def _is_empty_dict(found: Any, follower: Follower) -> bool:
    return type(found) is dict and not found
