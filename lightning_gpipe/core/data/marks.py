"""Marks of tensors, above all of those without a row per sample.

Every micro-batch needs a table of position embeddings, an adjacency matrix or class weights as a
whole. The shape does not distinguish them from batched tensors, so the user marks them. The mark is
an attribute of the tensor object and does not affect computation.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from lightning_gpipe.core.data.tensor_search import holds_tensor

_WHOLE = "_gpipe_whole"
_ALIASED = "_gpipe_aliased"
_PER_ROW = "_gpipe_per_row"

MARKS = (_WHOLE, _ALIASED)  # the names of all attributes that are marks

T = TypeVar("T", bound=Tensor)
V = TypeVar("V", Tensor, list[Any], tuple[Any, ...], np.ndarray)


class WholeList(list[Any]):
    """A list that belongs to the whole batch."""

    _gpipe_whole = True


class WholeTuple(tuple[Any, ...]):
    """A tuple that belongs to the whole batch."""

    __slots__ = ()
    _gpipe_whole = True


class _MarkedArray(np.ndarray):
    """An array that can have a mark; arrays computed from it are not marked."""


class PendingTensor(Tensor):
    """A tensor whose value the running pipeline has yet to compute; layers cannot read it."""


def whole(value: V) -> V:
    """Return the value with a mark by which every micro-batch gets it whole.

    Example::

        output = self.layers({"x": x, "adjacency": whole(adjacency)})

    A value that a layer returns unchanged keeps the mark. A layer whose result belongs to the whole
    batch must mark it; an output of the pipeline with a mark is returned once.

    Args:
        value: A tensor, dense or sparse, through which gradients flow; or a list, tuple or NumPy
            array. Those need a mark only if they have as many values as the batch has rows.

    Raises:
        TypeError: If it is none of these, a nested tensor, or a list that holds tensors. Other
            values go to every micro-batch without a mark.
        RuntimeError: If a worker of a DataLoader marks a tensor or an array.
    """
    if isinstance(value, list | tuple) and not holds_tensor(value):
        return cast(V, WholeList(value) if isinstance(value, list) else WholeTuple(value))
    if get_worker_info() is not None:
        raise RuntimeError(
            "whole() must mark a tensor or an array in the process that trains: got a call in a "
            "worker of a DataLoader, from which it arrives without its mark. Mark it in "
            "on_after_batch_transfer, or where the layers are called."
        )
    if isinstance(value, np.ndarray):
        return _marked(value, _WHOLE)
    if not isinstance(value, Tensor):
        raise TypeError(
            "whole() takes a tensor, or a list, tuple or array without tensors: got "
            f"{type(value).__name__}. Mark each tensor of a nested value by itself; other values "
            "go to every micro-batch without a mark."
        )
    if value.is_nested:
        raise TypeError("whole() takes a tensor with one shape: got a nested tensor. Pad it.")
    # A new tensor object, so that the caller's is not marked; sparse tensors have no views.
    marked = value.view_as(value) if value.layout is torch.strided else value.clone()
    setattr(marked, _WHOLE, True)
    return marked


def is_whole(value: object) -> bool:
    """Return whether ``value`` is marked by :func:`whole`."""
    return hasattr(value, _WHOLE)


def mark_per_row(array: np.ndarray) -> np.ndarray:
    """Return the array with a mark: it has an entry per row of the micro-batch."""
    return _marked(array, _PER_ROW)


def is_per_row(value: object) -> bool:
    """Return whether ``value`` is marked by :func:`mark_per_row`."""
    return hasattr(value, _PER_ROW)


def copy_marks(old: Tensor, new: T) -> T:
    """Copy the marks of ``old`` to ``new``, and return ``new``."""
    for mark in MARKS:
        if hasattr(old, mark):
            setattr(new, mark, True)
    return new


def mark_aliased(tensor: Tensor) -> None:
    """Mark a tensor whose memory is also sent to another stage."""
    setattr(tensor, _ALIASED, True)


def is_aliased(value: object) -> bool:
    """Return whether ``value`` is marked by :func:`mark_aliased`."""
    return hasattr(value, _ALIASED)


def _marked(array: np.ndarray, mark: str) -> np.ndarray:
    marked = array.view(_MarkedArray)
    setattr(marked, mark, True)
    return marked
