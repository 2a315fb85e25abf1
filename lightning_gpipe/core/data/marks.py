"""Marks tensors that belong to the whole batch and have no row per sample.

A table of position embeddings, the adjacency matrix of a graph, class weights: every micro-batch
needs such a tensor as a whole. Its shape does not distinguish it from a batched tensor, so the user
marks it. The mark is an attribute of the tensor object and does not affect computation: the plain
module takes a marked tensor like any other.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

_WHOLE = "_gpipe_whole"
_ALIASED = "_gpipe_aliased"

T = TypeVar("T", bound=Tensor)


def whole(tensor: Tensor) -> Tensor:
    """The same tensor, marked so that every micro-batch gets it whole.

    Example::

        output = self.layers({"x": x, "adjacency": whole(adjacency)})

    A layer that returns the tensor unchanged keeps the mark. A layer whose result belongs to the
    whole batch too must mark the result; as an output of the pipeline, it is then returned once.

    Args:
        tensor: A tensor, dense or sparse; gradients flow through to it.

    Raises:
        TypeError: If it is not a tensor, or a nested tensor. Values other than tensors go to every
            micro-batch without a mark.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"whole() takes a tensor: got {type(tensor).__name__}. Mark each tensor of a nested "
            "value by itself; other values go to every micro-batch without a mark."
        )
    if tensor.is_nested:
        raise TypeError("whole() takes a tensor with one shape: got a nested tensor. Pad it.")
    # A new tensor object, so that the caller's is not marked; sparse tensors have no views.
    marked = tensor.view_as(tensor) if tensor.layout is torch.strided else tensor.clone()
    setattr(marked, _WHOLE, True)
    return marked


def is_whole(value: object) -> bool:
    """Whether ``value`` is marked by :func:`whole`."""
    return hasattr(value, _WHOLE)


def copy_marks(old: Tensor, new: T) -> T:
    """Copy the marks of ``old`` to ``new``, and return ``new``."""
    for mark in (_WHOLE, _ALIASED):
        if hasattr(old, mark):
            setattr(new, mark, True)
    return new


def mark_aliased(tensor: Tensor) -> None:
    """Mark a tensor sent to a stage while another stage gets a tensor with the same memory."""
    setattr(tensor, _ALIASED, True)


def is_aliased(value: object) -> bool:
    """Whether ``value`` is marked by :func:`mark_aliased`."""
    return hasattr(value, _ALIASED)
