"""Compares the arguments of a call with those of a recorded one.

Most often a forward calls each of its blocks with what the forward before did.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

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

    @cached_property
    def key(self) -> tuple[int, Reading | None]:
        """Equal for those that accept the same tensors."""
        return self.source, self.learned_reading

    def fits(self, tensor: Tensor) -> bool:
        return tensor.dtype is self.dtype and tensor.dim() == self.dims


def same_arguments(expected: Any, tree: Any, recording: Any) -> bool:
    """Return whether the arguments of a call are those of a recorded one.

    These have a Value for a placeholder, and an :class:`OutsideTensor` for a tensor from outside.
    ``recording`` is the LoopRecording that follows a tape.
    """
    kind = type(expected)
    if kind is Value:
        return (
            type(tree) is Placeholder
            and tree.number == expected.number
            and tree.recording is recording
        )
    if kind is OutsideTensor:
        if not isinstance(tree, Tensor) or type(tree) is Placeholder:
            return False
        # Most often all blocks get the same ones.
        outsides = recording.outsides
        return outsides.accepted.get(expected.key) is tree or outsides.is_as(tree, expected)
    if kind is dict:
        if type(tree) is not dict or tuple(tree) != tuple(expected):
            return False
        items, others = expected.values(), tree.values()
    elif kind is tuple or kind is list or is_named(expected):
        if type(tree) is not kind or len(tree) != len(expected):
            return False
        items, others = expected, tree
    else:
        plain = type(tree) is kind and is_plain(expected) and is_plain(tree)
        return plain and bool(expected == tree)
    for item, other in zip(items, others, strict=True):
        if item is not other and not same_arguments(item, other, recording):
            return False
    return True


def is_plain(value: Any) -> bool:
    """Return whether two equal constants of this type mean the same."""
    if type(value) is slice:
        return all(map(is_plain, (value.start, value.stop, value.step)))
    return type(value) in _PLAIN


_PLAIN = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}
)
