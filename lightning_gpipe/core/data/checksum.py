"""Checksums of tensors, by which edits are found without copies, and values compared by processes.

A checksum is computed where the tensor is, not much slower than a copy of it. Each eight bytes are
an integer, which has a weight by its place; their sum is taken modulo 2**64. The weights are odd,
so a change of one integer changes the sum. Values that differ by rounding differ by one in many
places, so a sum without weights would often be the same.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from lightning_gpipe.core.data.tensors import bits_of

_PIECES = 64  # at least, of a large tensor: the weighted integers of one are in memory at once
_SHORTEST, _LONGEST = 2**9, 2**17  # pieces, in integers
_FACTOR = 0x5851F42D4C957F2D  # of the sum so far: odd, so that pieces have different weights


def checksum(tensor: Tensor) -> Tensor:
    """Return a 0-dim integer on the device of a dense tensor, almost surely its bytes' own."""
    with DisableTorchFunctionSubclass():  # a class of the user's has no part in it
        elements = bits_of(tensor).contiguous().view(-1)
    together = 8 // elements.element_size()
    whole = len(elements) - len(elements) % together
    first, rest = elements[:whole], elements[whole:]
    if first.storage_offset() % together or first.stride(0) != 1:  # any, if it has one element
        first = first.clone(memory_format=torch.contiguous_format)
    integers = first.view(torch.int64)
    length = _SHORTEST
    while length < min(len(integers) // _PIECES, _LONGEST):
        length *= 2
    weights = _weights(elements.device, length)
    total = torch.zeros((), dtype=torch.int64, device=elements.device)
    for words in (*integers.split(length), rest):
        total = total * _FACTOR + (words * weights[: len(words)]).sum()
    return total


@lru_cache
def _weights(device: torch.device, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    most = torch.iinfo(torch.int64).max
    weights = torch.randint(-most, most, (length,), generator=generator, device="cpu")
    return (weights | 1).to(device)
