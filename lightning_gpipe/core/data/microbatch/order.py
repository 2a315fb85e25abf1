"""Orders rows by length, and chooses the number of rows of each micro-batch."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_gpipe.core.data.microbatch.row_values import permuted


@dataclass(frozen=True)
class RowOrder:
    """The rows of a batch in the order in which they are split."""

    lengths: list[int]  # of each row, in this order
    longest: int  # the padded length
    permutation: Tensor | None  # the index in the batch of each row; None for the batch's order
    sizes: dict[int, list[int]] = field(default_factory=dict)  # for each number of chunks

    @classmethod
    def of(cls, lengths: list[int], longest: int, *, sort: bool) -> RowOrder:
        """Sort rows by length, the longest first, or keep them in the order of the batch."""
        if not sort:
            return cls(lengths, longest, None)
        order = sorted(range(len(lengths)), key=lambda k: -lengths[k])
        permutation = torch.tensor(order, dtype=torch.long, device="cpu")
        return cls([lengths[k] for k in order], longest, permutation)

    def longest_of(self, first: int, size: int) -> int:
        """Return the greatest length of ``size`` rows from ``first`` on, at least 1."""
        return min(self.longest, max([1, *self.lengths[first : first + size]]))

    def restore(self, leaf: Any) -> Any:
        """Put the rows of an output, or its other entries, back in the order of the batch."""
        if self.permutation is None:
            return leaf
        if len(leaf) != len(self.lengths):
            size = f"{len(leaf)} values"
            if isinstance(leaf, Tensor):
                size = f"shape {tuple(leaf.shape)}"
            raise ValueError(
                f"outputs must have the {len(self.lengths)} rows of the batch, to be put back in "
                f"its order: got {size}. Write sort=False if the layers change the number of rows."
            )
        return permuted(leaf, self.permutation.argsort())


def even_tokens(lengths: list[int], chunks: int) -> list[int]:
    """Return numbers of rows that minimise the tokens, with padding, of the largest micro-batch."""
    # The lengths do not increase, so the tokens of a run of rows are its size times its first
    # length, and the fewest runs within a limit come from adding rows to a run while they fit.
    # Bisection finds the least limit that needs at most ``chunks`` runs.
    longest = max(lengths, default=1)
    limits = range(longest, longest * max(len(lengths), 1) + 1)
    least = bisect_left(limits, True, key=lambda limit: len(_runs(lengths, limit)) <= chunks)
    return _runs(lengths, limits[least])


def _runs(lengths: list[int], limit: int) -> list[int]:
    sizes = [0]
    first = lengths[0] if lengths else 0
    for length in lengths:
        if (sizes[-1] + 1) * first > limit:
            sizes.append(0)
            first = length
        sizes[-1] += 1
    return sizes
