"""Splits a mini-batch into micro-batches and merges their outputs.

A pipeline needs several micro-batches to be busy, while the user has one mini-batch and wants one
output for it. Peers split each tensor on its own and pair up the pieces, so a tensor with fewer
rows silently drops rows of the others. Here the rows of the batch are counted once, every tensor
must have them, and a mini-batch of 10 rows in 4 chunks becomes 3, 3, 2 and 2 rows.

Both functions are ordinary differentiable PyTorch and run in the caller's graph, outside the
pipeline: the gradient of the input is put together by autograd itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gpipe.core.pytree import Flat, flatten, named_leaves, unflatten


def split(batch: Any, chunks: int) -> list[Any]:
    """Cut ``batch`` into at most ``chunks`` micro-batches of the same structure.

    Tensors of shape ``(rows, ...)`` are cut along dim 0 as evenly as possible, the larger pieces
    first; all must have the same number of rows. Everything else (0-dim tensors, strings, None,
    numbers) goes to every micro-batch. A batch of fewer rows than chunks makes fewer micro-batches.

    Args:
        batch: Any pytree with at least one tensor that has a batch dimension.
        chunks: The number of micro-batches wanted, at least 1.

    Raises:
        ValueError: If no tensor has a batch dimension, or the tensors disagree on its size.
    """
    leaves, spec = flatten(batch)
    batched = [isinstance(leaf, Tensor) and leaf.dim() > 0 for leaf in leaves]
    rows = {leaf.size(0) for leaf, cut in zip(leaves, batched, strict=True) if cut}
    if len(rows) != 1:
        raise ValueError(_no_common_rows(batch))

    sizes = _even(rows.pop(), chunks)
    if len(sizes) == 1:
        return [batch]
    pieces = [
        leaf.split(sizes) if cut else [leaf] * len(sizes)
        for leaf, cut in zip(leaves, batched, strict=True)
    ]
    return [unflatten(Flat(list(piece), spec)) for piece in zip(*pieces, strict=True)]


def merge(outputs: Sequence[Any]) -> Any:
    """Put the outputs of all micro-batches together as the output of their mini-batch.

    Tensors are concatenated along dim 0 in order, 0-dim tensors are stacked to shape ``(m,)``.
    Other values must be the same for all micro-batches, and are given once.

    Raises:
        ValueError: If the outputs differ in structure, or in a value that is not a tensor.
    """
    if len(outputs) == 1:
        return outputs[0]
    flat = [flatten(output) for output in outputs]
    specs = [spec for _, spec in flat]
    if any(spec != specs[0] for spec in specs):
        raise ValueError(
            "the outputs of all micro-batches must have one structure: got "
            + ", ".join(f"{spec} for micro-batch {i}" for i, spec in enumerate(specs))
        )
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return unflatten(Flat([_merge_leaf(k, column) for k, column in enumerate(columns)], specs[0]))


def _merge_leaf(k: int, values: Sequence[Any]) -> Any:
    if all(isinstance(value, Tensor) for value in values):
        return torch.stack(list(values)) if values[0].dim() == 0 else torch.cat(list(values))
    if not all(_same(value, values[0]) for value in values):
        raise ValueError(
            "an output that is not a tensor must be the same for all micro-batches: "
            f"got {list(values)} for leaf {k}. Return it as a tensor with a row per sample."
        )
    return values[0]


def _same(value: Any, other: Any) -> bool:
    if value is other:
        return True
    if isinstance(value, Tensor) or type(value) is not type(other):
        return False
    equal = value == other
    return bool(equal.all()) if hasattr(equal, "all") else bool(equal)  # arrays compare by element


def _even(rows: int, chunks: int) -> list[int]:
    m = max(1, min(chunks, rows))
    small, larger = divmod(rows, m)
    return [small + 1] * larger + [small] * (m - larger)


def _no_common_rows(batch: Any) -> str:
    tensors = [(name, leaf) for name, leaf in named_leaves(batch) if isinstance(leaf, Tensor)]
    found = ", ".join(f"input{name} of shape {tuple(leaf.shape)}" for name, leaf in tensors)
    if not any(leaf.dim() > 0 for _, leaf in tensors):
        return (
            "the pipeline's input must hold a tensor with a batch dimension to split into "
            f"micro-batches: got {found or f'no tensor in {type(batch).__name__}'}."
        )
    return (
        f"all tensors of a batch must have the same size in dim 0: got {found}. Move what has no "
        "row per sample into the model, or give it a batch dimension."
    )
