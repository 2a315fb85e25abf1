"""The order in which rows of different lengths are split, and how many each micro-batch gets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_gpipe.core.data.microbatch.rows import even_sizes
from lightning_gpipe.core.data.microbatch.values import permuted


@dataclass(frozen=True)
class Order:
    """The rows of a batch in the order in which they are split.

    Attributes:
        lengths: The length of each row, in this order.
        longest: The padded length.
        permutation: The index in the batch of each row, or None for the batch's own order.
        sizes: The number of rows of each micro-batch, by how many there are.
    """

    lengths: list[int]
    longest: int
    permutation: Tensor | None
    sizes: dict[int, list[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, lengths: list[int], longest: int, *, sort: bool) -> Order:
        """Rows sorted by length, the longest first, or in the order of the batch."""
        if not sort:
            return cls(lengths, longest, None)
        order = sorted(range(len(lengths)), key=lambda k: -lengths[k])
        permutation = torch.tensor(order, dtype=torch.long, device="cpu")
        return cls([lengths[k] for k in order], longest, permutation)

    def longest_of(self, first: int, size: int) -> int:
        """The greatest length of ``size`` rows from ``first`` on, at least 1 for the layers."""
        return min(self.longest, max([1, *self.lengths[first : first + size]]))

    def arrange(self, leaf: Any) -> Any:
        """The rows of a tensor, or other entries, in this order."""
        return leaf if self.permutation is None else _taken(leaf, self.permutation)

    def restore(self, leaf: Any) -> Any:
        """Undo :meth:`arrange`: the rows in the order of the batch."""
        if self.permutation is None:
            return leaf
        if len(leaf) != len(self.lengths):
            raise ValueError(
                f"outputs must have the {len(self.lengths)} rows of the batch, to be put back in "
                f"its order: got {_shape(leaf)}. Write sort=False if the layers change the number "
                "of rows."
            )
        return _taken(leaf, self.permutation.argsort())


def _taken(leaf: Any, permutation: Tensor) -> Any:
    if isinstance(leaf, Tensor):
        return leaf[permutation.to(leaf.device)]
    return permuted(leaf, permutation.tolist())


def _shape(leaf: Any) -> str:
    return f"shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else f"{len(leaf)} values"


def even_rows(lengths: list[int], chunks: int) -> list[int]:
    """Numbers of rows that differ by one at most."""
    return even_sizes(len(lengths), chunks)


def even_tokens(lengths: list[int], chunks: int) -> list[int]:
    """Numbers of rows for which the largest micro-batch has the fewest tokens, padding included.

    The lengths do not increase, so a run of rows has its size times its first length in tokens, and
    for a given limit the fewest runs come from adding rows to a run while they fit. The least limit
    that needs no more runs than ``chunks`` is found by bisection.
    """
    low, high = max(lengths, default=1), max(lengths, default=1) * max(len(lengths), 1)
    while low < high:
        limit = (low + high) // 2
        if len(_runs(lengths, limit)) <= chunks:
            high = limit
        else:
            low = limit + 1
    return _runs(lengths, high)


def _runs(lengths: list[int], limit: int) -> list[int]:
    sizes = [0]
    first = lengths[0] if lengths else 0
    for length in lengths:
        if (sizes[-1] + 1) * first > limit:
            sizes.append(0)
            first = length
        sizes[-1] += 1
    return sizes
