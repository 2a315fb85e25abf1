"""Merges the outputs of micro-batches: leaf by leaf, whatever their structure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gpipe.core.data.marks import is_whole
from lightning_gpipe.core.data.pytree import FlatTree, tree_flatten


def flattened(outputs: Sequence[Any]) -> list[FlatTree]:
    """The outputs of all micro-batches, flattened.

    Raises:
        ValueError: If they differ in structure.
    """
    flat = [tree_flatten(output) for output in outputs]
    specs = [spec for _, spec in flat]
    if any(spec != specs[0] for spec in specs):
        raise ValueError(
            "the outputs of all micro-batches must have one structure: got "
            + ", ".join(f"{spec} for micro-batch {i}" for i, spec in enumerate(specs))
        )
    return flat


def merge_leaf(k: int, values: Sequence[Any], dim: int = 0) -> Any:
    """Leaf ``k`` of the merged output, given that leaf of all micro-batches.

    Tensors are concatenated along ``dim``, 0-dim tensors are stacked, and marked tensors and other
    values are returned once.

    Raises:
        ValueError: If values that are returned once differ.
    """
    tensors = [value for value in values if isinstance(value, Tensor)]
    if len(tensors) == len(values) and not all(map(is_whole, tensors)):
        return torch.stack(tensors) if tensors[0].dim() == 0 else torch.cat(tensors, dim)
    if not all(_same(value, values[0]) for value in values):
        raise ValueError(
            "an output without a row per sample, one that is not a tensor or is marked by whole(), "
            f"must be the same for all micro-batches: got {list(values)} for leaf {k}. Return it "
            "as a tensor with a row per sample."
        )
    return values[0]


def _same(value: Any, other: Any) -> bool:
    if value is other:
        return True
    if type(value) is not type(other):
        return False
    if isinstance(value, Tensor):
        if not is_whole(value) or value.layout != other.layout or value.shape != other.shape:
            return False
        return all(map(_equal, _dense_parts(value), _dense_parts(other)))
    equal = value == other
    return bool(equal.all()) if hasattr(equal, "all") else bool(equal)  # arrays compare by element


def _equal(tensor: Tensor, other: Tensor) -> bool:
    if (tensor.data_ptr(), tensor.stride()) == (other.data_ptr(), other.stride()):
        return tensor.shape == other.shape  # the same memory: nothing to compare
    there = tensor.to(other.device)
    if not there.dtype.is_floating_point:
        return torch.equal(there, other)
    return torch.allclose(there, other, rtol=0, atol=0, equal_nan=True)


def _dense_parts(tensor: Tensor) -> list[Tensor]:
    """Dense tensors that are equal if the tensors that they represent are."""
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return [tensor.indices(), tensor.values()]
    return [tensor if tensor.layout is torch.strided else tensor.to_dense()]
