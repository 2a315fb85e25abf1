"""What runs are compared by: named tensors on the CPU.

They are copied there at once. There they take no memory of the devices, no layer that edits in
place can reach them, and no stream has to be waited for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gpipe.core.data import MicroBatching, Rows, copy_marks, map_tensors, named_leaves

# What a pipeline promises to compute, in the order in which a fault is looked for.
OUTPUT, GRADIENTS, BUFFERS, INPUT_GRADIENTS = KINDS = (
    "output",
    "gradients",
    "buffers",
    "input gradients",
)

Values = Mapping[str, Tensor | None]
Mask = Mapping[str, Tensor]  # True where a value counts; a value without one counts everywhere


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
    """The inexact tensors of a layer's outputs for all micro-batches, if they can be put together.

    Nothing says that they can: from layer to layer anything may pass.
    """
    found = list(map(inexact, outputs))
    if any(each.keys() != found[0].keys() for each in found):
        return None
    try:
        return {path: Rows().merge([each[path] for each in found], None) for path in found[0]}
    except (ValueError, RuntimeError):
        return None


def computed(microbatching: MicroBatching, outputs: Sequence[Any], batch: Any) -> Mask:
    """Which elements of a merged output come from a layer, as those of a padding do not.

    They are those that are ones when ones are merged, and zeros when zeros are.
    """

    def filled(value: int) -> dict[str, Tensor]:
        fill = [map_tensors(lambda x: copy_marks(x, torch.full_like(x, value)), o) for o in outputs]
        return tensors(microbatching.merge(fill, batch))

    zeros = filled(0)
    return {path: ones != zeros[path] for path, ones in filled(1).items()}


def only(mask: Mask, of: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The values with zero where they do not count."""
    return {
        path: value.where(mask[path], torch.zeros_like(value))
        if path in mask and mask[path].shape == value.shape
        else value
        for path, value in of.items()
    }
