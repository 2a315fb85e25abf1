"""Merges the outputs of micro-batches leaf by leaf."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp import is_autocast_available

from lightning_gpipe.core.data.marks import is_whole
from lightning_gpipe.core.data.microbatch.row_values import (
    Entries,
    gathered,
    has_entries,
    joined,
    plain,
    texts_in,
)
from lightning_gpipe.core.data.pytree import FlatTree, tree_flatten, tree_unflatten
from lightning_gpipe.core.data.tensors import parts


def merged(
    outputs: Sequence[Any],
    batch: Any,
    sizes: Callable[[], list[int] | None],
    dims: Callable[[Any, Sequence[Sequence[Any]]], Sequence[int]] | None = None,
    restore: Callable[[Any], Any] = lambda leaf: leaf,
) -> Any:
    """Merge the outputs of all micro-batches, which must have one structure, into one.

    Args:
        sizes: Returns the number of rows of each micro-batch, or None if unknown.
        dims: Returns the dim of each leaf's rows, for the first output and the values of each leaf;
            None takes dim 0.
        restore: Applied to each concatenated leaf, tensor or not.
    """
    trees = list(map(tree_flatten, outputs))
    if not all(isinstance(leaf, Tensor) for leaf in trees[0].leaves):
        outputs = list(map(gathered, outputs))
        trees = list(map(tree_flatten, outputs))
    specs = [tree.spec for tree in trees]
    if any(spec != specs[0] for spec in specs):
        raise ValueError(
            "the outputs of all micro-batches must have one structure: got "
            + ", ".join(f"{spec} for micro-batch {i}" for i, spec in enumerate(specs))
        )
    columns = list(zip(*(tree.leaves for tree in trees), strict=True))
    row_dims = [0] * len(columns) if dims is None else dims(outputs[0], columns)
    leaves: list[Any] = []
    for k, (values, dim) in enumerate(zip(columns, row_dims, strict=True)):
        tensors = all(isinstance(value, Tensor) for value in values)
        if tensors and not all(map(is_whole, values)):
            if values[0].dim():
                leaves.append(restore(concatenated(k, values, dim)))
            else:
                leaves.append(_stacked(values))
        elif all(map(has_entries, values)) or _texts_per_row(k, values, batch, sizes):
            leaves.append(restore(joined(values)))
        else:
            leaves.append(_common_value(k, values))
    output = tree_unflatten(FlatTree(leaves, specs[0]))
    return output if all(isinstance(leaf, Tensor) for leaf in leaves) else plain(output)


def _stacked(values: tuple[Tensor, ...]) -> Tensor:
    if len(values) == 1:
        return values[0]
    if values[0].requires_grad:
        warnings.warn(
            "an output of layers should have a row per sample: got one without dims that has a "
            "gradient, which becomes a vector with a number for each micro-batch. If it is a term "
            "of the loss, let its layer hand it out by loss_term(), from lightning_gpipe, or take "
            "the mean of the vector.",
            stacklevel=2,
        )
    return torch.stack(values)


def _texts_per_row(
    k: int, values: Sequence[Any], batch: Any, sizes: Callable[[], list[int] | None]
) -> bool:
    """Return whether lists of strings of layers have one per row; raise if this is unknown."""
    if not all(isinstance(value, Entries) for value in values):
        return False
    if [len(value) for value in values] != sizes():
        return False
    if any(value != values[0] for value in values) or len(values) == 1:
        return True
    if any(tuple(texts) == tuple(values[0]) for texts in texts_in(batch)):
        return False
    raise ValueError(
        f"it must be clear whether strings belong to rows: got the same {list(values[0])} for "
        f"all micro-batches of {len(values[0])} rows, in leaf {k} of the output. Return "
        "whole(value), from lightning_gpipe, if they belong to the whole mini-batch, and a "
        "tensor if there is one per row."
    )


def _common_value(k: int, values: Sequence[Any]) -> Any:
    if not all(same_value(value, values[0]) for value in values):
        contents = ", ".join(map(_described, values))
        raise ValueError(
            "an output that is not a tensor, or is marked by whole(), must be the same for all "
            f"micro-batches: got [{contents}] for leaf {k}. Return it as a tensor with a row per "
            "sample in dim 0."
        )
    return values[0]


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return repr(list(value) if isinstance(value, Entries) else value)


def are_rows(outputs: Sequence[Any]) -> bool:
    """Return whether each output is one tensor with rows; others need :func:`merged`."""
    first = outputs[0]
    if list(map(type, outputs)) != [Tensor] * len(outputs):
        return False
    return bool(first.dim()) and not is_whole(first)


def concatenated(k: int, tensors: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenate the tensors of leaf ``k`` along the dim of the rows, or raise an error."""
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
    kind = tensors[0].device.type
    try:
        if not (is_autocast_available(kind) and torch.is_autocast_enabled(kind)):  # most often
            return torch.cat(list(tensors), dim)
        with torch.autocast(kind, enabled=False):  # it would cast, or refuse, some dtypes
            return torch.cat(list(tensors), dim)
    except RuntimeError as error:
        shapes = [tuple(x.shape) for x in tensors]
        if len({(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}) == 1:
            raise
        raise ValueError(
            f"the outputs of all micro-batches must have one shape but for the rows in dim {dim}: "
            f"got shapes {shapes} for leaf {k} of the output. Pad them in the layer to the length "
            "of the mini-batch, as pad_packed_sequence(..., total_length=...) does, or write "
            "microbatching=PaddedSequences(..., pad_outputs=[...]), which pads them."
        ) from error


def same_value(value: Any, other: Any) -> bool:
    """Return whether the values of two micro-batches are equal; NaN equals itself."""
    if value is other:
        return True
    if type(value) is not type(other):
        return False
    if isinstance(value, Tensor):
        if value.layout != other.layout or value.shape != other.shape:
            return False
        return all(map(_equal, _comparable(value), _comparable(other)))
    equal = value == other
    return bool(equal.all()) if hasattr(equal, "all") else bool(equal)  # arrays compare by element


def _equal(tensor: Tensor, other: Tensor) -> bool:
    if (tensor.data_ptr(), tensor.stride()) == (other.data_ptr(), other.stride()):
        return tensor.shape == other.shape  # the same memory: nothing to compare
    there = tensor.to(other.device)
    if not there.dtype.is_floating_point:
        return torch.equal(there, other)
    return torch.allclose(there, other, rtol=0, atol=0, equal_nan=True)


def _comparable(tensor: Tensor) -> list[Tensor]:
    return parts(tensor.coalesce() if tensor.layout is torch.sparse_coo else tensor)
