"""The sizes of a mini-batch's micro-batches."""

from __future__ import annotations

from typing import NamedTuple


class Division(NamedTuple):
    """The sizes of the dim in which a mini-batch was split, and those of its other dims.

    A layer that mixes a dim of one of the first sizes probably mixes rows.
    """

    sizes: tuple[int, ...]  # the number of rows of each micro-batch
    widths: frozenset[int]  # the sizes of the other dims of tensors with rows
