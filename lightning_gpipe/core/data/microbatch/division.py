"""How the rows of a mini-batch were divided among its micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Division(NamedTuple):
    """The sizes of the dim in which a mini-batch was cut, and those of its other dims.

    A layer that finds the first in a dim that it mixes gets pieces of what belongs together.

    Attributes:
        sizes: The number of rows of each micro-batch.
        widths: The sizes of the other dims of tensors with rows.
    """

    sizes: tuple[int, ...]
    widths: frozenset[int]

    @classmethod
    def of(cls, tensors: Sequence[Sequence[tuple[Any, int]]]) -> Division:
        """Of the tensors with rows of each micro-batch, each with the dim of its rows."""
        sizes = tuple(found[0][0].size(found[0][1]) for found in tensors)
        widths = {n for x, dim in tensors[0] for k, n in enumerate(x.shape) if k != dim}
        return cls(sizes, frozenset(widths))
