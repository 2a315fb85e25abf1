"""Merges the outputs of micro-batches: leaf by leaf, whatever their structure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gpipe.core.data.marks import is_whole
from lightning_gpipe.core.data.microbatch.values import (
    Entries,
    gathered,
    has_entries,
    joined,
    plain,
    texts_in,
)
from lightning_gpipe.core.data.pytree import FlatTree, tree_flatten, tree_unflatten


class Merging:
    """Merges outputs of one structure.

    Args:
        outputs: What the last layer returned for each micro-batch.
        batch: The mini-batch.
        sizes: Tells the number of rows of each micro-batch, or None if that is unknown.

    Attributes:
        m: The number of micro-batches.
        example: The output of the first, with lists that have an entry per row as one leaf.
        columns: For each leaf, its values in all micro-batches.

    Raises:
        ValueError: If the outputs differ in structure.
    """

    def __init__(
        self, outputs: Sequence[Any], batch: Any, sizes: Callable[[], list[int] | None]
    ) -> None:
        flat = [tree_flatten(output) for output in outputs]
        if not all(isinstance(leaf, Tensor) for leaf in flat[0].leaves):
            outputs = list(map(gathered, outputs))
            flat = list(map(tree_flatten, outputs))
        specs = [spec for _, spec in flat]
        if any(spec != specs[0] for spec in specs):
            raise ValueError(
                "the outputs of all micro-batches must have one structure: got "
                + ", ".join(f"{spec} for micro-batch {i}" for i, spec in enumerate(specs))
            )
        self.m = len(outputs)
        self.example = outputs[0]
        self.columns = list(zip(*(leaves for leaves, _ in flat), strict=True))
        self._spec = specs[0]
        self._batch = batch
        self._sizes = sizes

    def merged(self, dims: Sequence[int], restore: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
        """The merged output.

        Args:
            dims: For each leaf, the dim along which tensors are concatenated.
            restore: Applied to what has an entry per row, after it was concatenated.

        Raises:
            ValueError: If values that are returned once differ.
        """
        leaves = [
            self._leaf(k, values, dim, restore)
            for k, (values, dim) in enumerate(zip(self.columns, dims, strict=True))
        ]
        output = tree_unflatten(FlatTree(leaves, self._spec))
        return output if all(isinstance(leaf, Tensor) for leaf in leaves) else plain(output)

    def _leaf(self, k: int, values: Sequence[Any], dim: int, restore: Callable[[Any], Any]) -> Any:
        tensors = [value for value in values if isinstance(value, Tensor)]
        if len(tensors) == len(values) and not all(map(is_whole, tensors)):
            if tensors[0].dim() == 0:
                return torch.stack(tensors) if self.m > 1 else tensors[0]
            return restore(concatenated(k, tensors, dim))
        if all(map(has_entries, values)) or self._texts_per_row(k, values):
            return restore(joined(values))
        if not all(_same(value, values[0]) for value in values):
            found = [list(value) if isinstance(value, Entries) else value for value in values]
            raise ValueError(
                "an output without a row per sample, one that is not a tensor or is marked by "
                f"whole(), must be the same for all micro-batches: got {found} for leaf {k}. "
                "Return it as a tensor with a row per sample."
            )
        return values[0]

    def _texts_per_row(self, k: int, values: Sequence[Any]) -> bool:
        """Whether lists of strings that layers made have one for each row.

        Raises:
            ValueError: If that cannot be told: all are the same, as settings are.
        """
        if not all(isinstance(value, Entries) for value in values):
            return False
        if [len(value) for value in values] != self._sizes():
            return False
        if any(value != values[0] for value in values) or len(values) == 1:
            return True
        if any(tuple(each) == tuple(values[0]) for each in texts_in(self._batch)):
            return False
        raise ValueError(
            f"it must be clear whether strings belong to rows: got the same {list(values[0])} for "
            f"all micro-batches of {len(values[0])} rows, in leaf {k} of the output. Return "
            "whole(value), from lightning_gpipe, if they belong to the whole mini-batch, and a "
            "tensor if there is one per row."
        )


def are_rows(outputs: Sequence[Any]) -> bool:
    """Whether each output is one tensor with rows; for others see :class:`Merging`."""
    first = outputs[0]
    if list(map(type, outputs)) != [Tensor] * len(outputs):
        return False
    return bool(first.dim()) and not is_whole(first)


def concatenated(k: int, tensors: Sequence[Tensor], dim: int) -> Tensor:
    """Tensors with rows as one.

    Args:
        k: The index of the leaf that they are.
        tensors: Its values in all micro-batches.
        dim: The dim of the rows.

    Raises:
        ValueError: If they cannot be concatenated, or not with gradients.
    """
    _check_layouts(k, tensors)
    return torch.cat(list(tensors), dim)


def _check_layouts(k: int, tensors: Sequence[Tensor]) -> None:
    """Raise if tensors cannot be concatenated, or not with gradients."""
    for x in tensors:
        if x.is_nested:
            cure = "Return it padded, with torch.nested.to_padded_tensor(x, 0.0)"
        elif x.layout is torch.strided or (x.layout is torch.sparse_coo and not x.requires_grad):
            continue
        else:
            cure = (
                "Return x.to_dense(), or mark it by whole() if it belongs to the whole mini-batch"
            )
        grad = " that requires a gradient" if x.requires_grad else ""
        raise ValueError(
            "outputs with a row per sample must be dense, so that they can be concatenated: got "
            f"one of layout {x.layout}{grad} for leaf {k}. {cure}."
        )


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
