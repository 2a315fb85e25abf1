"""A value that is one dense tensor, as most values between stages, as a row of integers.

To pickle and read its form would take longer than all else that is done with a small one.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_gpipe.core.data import MARKS
from lightning_gpipe.core.transport.process_group.wire.tensor_bytes import (
    DenseForm,
    GpuPair,
    form_and_bytes,
    is_dense,
)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32)
_NUMBERS = {dtype: number for number, dtype in enumerate(_DTYPES)}
_FIRST = 1  # the first integer, and so the first byte; a pickle begins with 128
_OVER_HOST = (-1, -1)  # in the place of the GPUs


def has_number(dtype: torch.dtype) -> bool:
    """Return True if a lone tensor may be of this type."""
    return dtype in _NUMBERS


class LoneTensor(NamedTuple):
    """The form of the tensor, its ``requires_grad``, and integers that go with it in a message."""

    numbers: tuple[int, ...]
    requires_grad: bool
    form: DenseForm

    def encode(self) -> bytes:
        dtype, size, stride, stored, gpus = self.form
        counts = len(self.numbers), len(size)
        fixed = *counts, *self.numbers, self.requires_grad, _NUMBERS[dtype], *(gpus or _OVER_HOST)
        words = _FIRST, *fixed, *size, *stride, *stored
        return struct.pack(f"<{len(words)}q", *words)

    @classmethod
    def decode(cls, body: bytes) -> LoneTensor | None:
        """Read it from bytes; None if they hold another value."""
        if body[0] != _FIRST:
            return None
        _, count, dims, *words = struct.unpack(f"<{len(body) // 8}q", body)
        numbers, (requires_grad, dtype, *gpus) = words[:count], words[count : count + 4]
        at = count + 4
        size, stride, stored = (tuple(words[at + k * dims :][:dims]) for k in range(3))
        pair = None if tuple(gpus) == _OVER_HOST else (gpus[0], gpus[1])
        form = DenseForm(_DTYPES[dtype], size, stride, stored, pair)
        return cls(tuple(numbers), bool(requires_grad), form)


def split_lone_tensor(
    leaves: list[Any], numbers: tuple[int, ...], gpus: GpuPair | None
) -> tuple[bytes, Tensor] | None:
    """Return a lone tensor without its content, and the content; None if ``leaves`` are not one."""
    tensor: Any = leaves[0] if len(leaves) == 1 else None
    if not is_dense(tensor) or not has_number(tensor.dtype):
        return None
    if any(hasattr(tensor, mark) for mark in MARKS):
        return None
    form, content = form_and_bytes(tensor, gpus)
    return LoneTensor(numbers, tensor.requires_grad, form).encode(), content
