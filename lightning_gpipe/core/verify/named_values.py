"""The values by which runs are compared: named tensors on the CPU.

There they use no memory of devices, layers cannot edit them, and reading waits for no stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpipe.core.data import (
    MicroBatching,
    Rows,
    change_tensors,
    named_leaves,
    requires_grad,
)
from lightning_gpipe.core.faithful import Changes
from lightning_gpipe.core.layout import holders

# The values that a pipeline must compute, in the order in which differences are searched.
OUTPUT, GRADIENTS, BUFFERS = "output", "gradients", "buffers"
INPUT_GRADIENTS, LOSS_TERMS = "input gradients", "loss terms"
LOSS = "loss"  # of a step

Values = Mapping[str, Tensor | None]
Mask = Mapping[str, Tensor]  # True for elements to compare; without a mask all are compared


def on_cpu(tree: Any) -> Any:
    """Return the tree with a copy of each tensor on the CPU, in no graph."""
    return change_tensors(tree, lambda x: x.detach().to("cpu", copy=True))


def tensors(tree: Any) -> dict[str, Tensor]:
    """Return the tensors of a tree by their path in it."""
    return {path: leaf for path, leaf in named_leaves(tree) if isinstance(leaf, Tensor)}


def unpacked(values: Sequence[Any]) -> Any:
    """Return the only value, or a list of several."""
    return values[0] if len(values) == 1 else list(values)


def inexact(tree: Any) -> dict[str, Tensor]:
    """Return the tensors of a tree that are subject to rounding, by their path in it."""
    return {path: x for path, x in tensors(tree).items() if x.is_floating_point() or x.is_complex()}


def merged(outputs: Sequence[Any]) -> Values | None:
    """Merge the inexact tensors of a layer's outputs; None if they have no rows to concatenate."""
    groups = list(map(inexact, outputs))
    if any(group.keys() != groups[0].keys() for group in groups):
        return None
    try:
        return {path: Rows().merge([group[path] for group in groups], None) for path in groups[0]}
    except (ValueError, RuntimeError):
        return None


def kept_values(changes: Changes, named: Iterable[tuple[str, nn.Module]]) -> dict[str, Tensor]:
    """Return copies of the tensors and numbers in attributes of modules that have changed.

    Those whose names begin with an underscore are for the layer itself, lists get more, and a graph
    is watched for itself.
    """
    changed = changes.slots
    found: dict[str, Tensor] = {}
    for path, module in named:
        for holder in holders([module]):
            for name, value in holder.held.items():
                if holder.slot(name) not in changed or name.startswith("_"):
                    continue
                items = value.items() if isinstance(value, dict) else [("", value)]
                for key, item in items:
                    if isinstance(item, Tensor | int | float) and not requires_grad(item):
                        where = f"{path}.{holder.prefix}{name}" + f"[{key!r}]" * bool(key)
                        found[where] = on_cpu(torch.as_tensor(item))
    return found


def computed(microbatching: MicroBatching, outputs: Sequence[Any], batch: Any) -> Mask:
    """Return which elements of a merged output come from a layer, and not from padding.

    They are one when ones are merged, and zero when zeros are merged.
    """

    def filled(value: int) -> dict[str, Tensor]:
        fill = [change_tensors(output, lambda x: torch.full_like(x, value)) for output in outputs]
        return tensors(microbatching.merge(fill, batch))

    zeros = filled(0)
    return {path: ones != zeros[path] for path, ones in filled(1).items()}


def masked(values: Mapping[str, Tensor], mask: Mask) -> dict[str, Tensor]:
    """Return the values, with zeros where the mask is False."""
    return {
        path: value.where(mask[path], torch.zeros_like(value))
        if path in mask and mask[path].shape == value.shape
        else value
        for path, value in values.items()
    }
