"""Checksums of tensors, by which processes compare values without sending them.

A checksum is computed where the tensor is, and only its number goes to the host. Each element is an
integer by its bytes, and has a weight by its place; their sum is taken modulo 2**64. The weights
are odd, so a change of one element changes the sum. Values that differ by rounding differ by one in
many places, so a sum without weights would often be the same.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from lightning_gpipe.core.data import bits_of

_PIECE = 2**17  # elements, whose weighted values are in memory at once
_FACTOR = 0x5851F42D4C957F2D  # of the sum so far: odd, so that pieces have different weights


def checksum(tensor: Tensor) -> Tensor:
    """Return a 0-dim integer on the device of a dense tensor, almost surely its bytes' own."""
    words = bits_of(tensor).contiguous().view(-1)
    weights = _weights(words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for piece in words.split(_PIECE):
        total = total * _FACTOR + (piece * weights[: len(piece)]).sum()
    return total


@lru_cache
def _weights(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    most = torch.iinfo(torch.int64).max
    weights = torch.randint(-most, most, (_PIECE,), generator=generator)
    return (weights | 1).to(device)
