"""What stands for the arguments of a recorded call that are no placeholders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_gpipe.core.frontends.module_list.arguments import Reading


@dataclass(frozen=True)
class Outside:
    """A tensor from outside in the arguments of a recorded call.

    Attributes:
        number: The number of the value that the step gets.
        source: That of the input; another one if the stage must reshape it.
        reading: How it is cut.
        learned: What was learned of that; None if its shape tells.
        dtype, dims: Its type and number of dims.
    """

    number: int
    source: int
    reading: Reading
    learned: Reading | None
    dtype: torch.dtype
    dims: int

    @property
    def key(self) -> tuple[int, Reading | None]:
        """Equal for those that take the same tensors."""
        return self.source, self.learned

    def fits(self, tensor: Tensor) -> bool:
        """Whether a tensor is of the same kind, as far as its shape does not matter."""
        return tensor.dtype is self.dtype and tensor.dim() == self.dims


def same_constant(one: Any, other: Any) -> bool:
    """Whether two arguments that are no tensors are equal, for sure."""
    if one is other:
        return True
    return type(one) is type(other) and is_plain(one) and is_plain(other) and bool(one == other)


def is_plain(value: Any) -> bool:
    """Whether it is a constant that is equal to another one only if it means the same."""
    if type(value) is slice:
        return all(map(is_plain, (value.start, value.stop, value.step)))
    return type(value) in _PLAIN


_NUMBERS = (bool, int, float, complex)
_PLAIN = frozenset({type(None), *_NUMBERS, str, bytes, torch.dtype, torch.device, torch.Size})
