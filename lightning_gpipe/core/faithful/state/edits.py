"""Edits of a tensor, seen by its version counter and by its value."""

from __future__ import annotations

from torch import Tensor

from lightning_gpipe.core.data import equal


def version_of(tensor: Tensor) -> int:
    """Return the version counter, which edits increment unless they go through ``tensor.data``."""
    return 0 if tensor.is_inference() else tensor._version


def same_value(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal; a NaN differs from itself."""
    same_kind = one.shape == other.shape and one.layout == other.layout
    return same_kind and (one.is_meta or equal(one, other))
