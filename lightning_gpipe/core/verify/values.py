"""The values by which runs are compared: named tensors on the CPU.

They are copied to the CPU at once. There they use no memory of the devices, layers cannot edit them
in place, and reading them waits for no stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gpipe.core.data import MicroBatching, Rows, copy_marks, map_tensors, named_leaves

# What a pipeline promises to compute, in the order in which it is searched for a difference.
OUTPUT, GRADIENTS, BUFFERS, INPUT_GRADIENTS, LOSS_TERMS = KINDS = (
    "output",
    "gradients",
    "buffers",
    "input gradients",
    "loss terms",
)

Values = Mapping[str, Tensor | None]
Mask = Mapping[str, Tensor]  # True for elements to compare; without a mask all are compared


def on_cpu(tree: Any) -> Any:
    """The tree with a copy of each tensor on the CPU, in no graph."""
    return map_tensors(lambda x: copy_marks(x, x.detach().to("cpu", copy=True)), tree)


def tensors(tree: Any) -> dict[str, Tensor]:
    """The tensors of a tree by their path in it."""
    return {path: leaf for path, leaf in named_leaves(tree) if isinstance(leaf, Tensor)}


def values(tree: Any) -> dict[str, Tensor]:
    """The tensors and numbers of a tree by their path in it, the numbers as tensors."""
    return {
        path: leaf
        if isinstance(leaf, Tensor)
        else torch.tensor(leaf, dtype=torch.float64, device="cpu")
        for path, leaf in named_leaves(tree)
        if isinstance(leaf, Tensor | bool | int | float)
    }


def inexact(tree: Any) -> dict[str, Tensor]:
    """The tensors of a tree that are subject to rounding, by their path in it."""
    found = tensors(tree).items()
    return {path: x for path, x in found if x.is_floating_point() or x.is_complex()}


def merged(outputs: Sequence[Any]) -> Values | None:
    """The inexact tensors of a layer's outputs, merged from all micro-batches; None if impossible.

    Layers may pass anything to one another, so their outputs need not have rows to concatenate.
    """
    groups = list(map(inexact, outputs))
    if any(group.keys() != groups[0].keys() for group in groups):
        return None
    try:
        return {path: Rows().merge([group[path] for group in groups], None) for path in groups[0]}
    except (ValueError, RuntimeError):
        return None


def computed(microbatching: MicroBatching, outputs: Sequence[Any], batch: Any) -> Mask:
    """Which elements of a merged output come from a layer, and not from padding.

    They are those that are one when ones are merged, and zero when zeros are merged.
    """

    def filled(value: int) -> dict[str, Tensor]:
        fill = [map_tensors(lambda x: copy_marks(x, torch.full_like(x, value)), o) for o in outputs]
        return tensors(microbatching.merge(fill, batch))

    zeros = filled(0)
    return {path: ones != zeros[path] for path, ones in filled(1).items()}


def only(mask: Mask, of: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The values, with zeros where the mask is False."""
    return {
        path: value.where(mask[path], torch.zeros_like(value))
        if path in mask and mask[path].shape == value.shape
        else value
        for path, value in of.items()
    }
