"""Marks tensors that belong to the whole batch and have no row per sample.

A positional table, a graph's adjacency, a matrix of weights for the classes: such a tensor must
reach every micro-batch as it is. Nothing in its shape tells it from a batch, so the user says it.
The mark is an attribute of the tensor object, which changes nothing about the tensor: the plain
module takes it like any other.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

_MARK = "_gpipe_whole"
_ELSEWHERE = "_gpipe_elsewhere"

T = TypeVar("T", bound=Tensor)


def whole(tensor: Tensor) -> Tensor:
    """The same tensor, marked as one that every micro-batch gets whole.

    Example::

        output = self.layers({"x": x, "adjacency": whole(adjacency)})

    A layer that only passes it on keeps the mark. One that computes something of it that is of the
    whole batch too marks its result; as an output, it is then given once.

    Args:
        tensor: Any tensor; gradients flow through to it.

    Raises:
        TypeError: If it is no tensor. Other values go to every micro-batch anyway.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"whole() marks a tensor: got {type(tensor).__name__}. Mark each tensor of a nested "
            "value by itself; what is no tensor goes to every micro-batch anyway."
        )
    if tensor.is_nested:
        raise TypeError("whole() marks tensors with one shape: got a nested tensor. Pad it.")
    # A new object, so that the caller's own is not marked; sparse tensors have no views.
    marked = tensor.view_as(tensor) if tensor.layout is torch.strided else tensor.clone()
    setattr(marked, _MARK, True)
    return marked


def is_whole(value: object) -> bool:
    """Whether ``value`` is marked."""
    return hasattr(value, _MARK)


def copy_marks(old: Tensor, new: T) -> T:
    """Mark ``new``, which stands for ``old``, as that is marked."""
    for mark in (_MARK, _ELSEWHERE):
        if hasattr(old, mark):
            setattr(new, mark, True)
    return new


def mark_elsewhere(tensor: Tensor) -> None:
    """Mark a tensor whose memory another stage works on too, under another name."""
    setattr(tensor, _ELSEWHERE, True)


def is_elsewhere(value: object) -> bool:
    """Whether ``value`` is marked by :func:`mark_elsewhere`."""
    return hasattr(value, _ELSEWHERE)
