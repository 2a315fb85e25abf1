"""Moves the layers of a model, and what is around them, to the devices of complete layouts."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn

from lightning_gpipe.core.frontends import (
    check_unread_weights,
    forget,
    forget_values,
    is_in_another_process,
    move,
    place,
    place_around,
    replaceable,
)
from lightning_gpipe.core.layout import META, Layout


def place_all(root: nn.Module, layouts: Sequence[Layout]) -> None:
    """Move the layers to their devices, and the rest of ``root`` to the device around them.

    Layers of other processes are moved to the meta device.

    Raises:
        TypeError, ValueError: If tensors on the meta device cannot get their values.
    """
    check_unread_weights(root)
    layers = {
        layer for layout in layouts for partition in layout.partitions for layer in partition.layers
    }
    with replaceable(*root.modules()):
        _place(root, layers, layouts)
    for layout in layouts:
        _check_values(layout)


def _place(root: nn.Module, layers: Collection[nn.Module], layouts: Sequence[Layout]) -> None:
    place_around(root, layers, layouts[0].outside)
    for layout in layouts:
        homed = {id(p) for p, home in layout.homes.items() if home != META}
        # All processes draw what they initialise from one generator, that of the CPU.
        created_on = torch.device("cpu") if layout.spread else None
        for j, partition in enumerate(layout.partitions):
            for layer in partition.layers:
                if layout.owner_of(j) == layout.rank:
                    place(layer, layout.device_of(j), created_on)
                else:
                    forget(layer, homed)
    for layout in layouts:
        move_home(layout)


def move_home(layout: Layout) -> None:
    """Move parameters to their homes."""
    for parameter, device in layout.homes.items():
        if device == META:
            forget_values(parameter)
        elif parameter.device != device:
            move(parameter, device)


def _check_values(layout: Layout) -> None:
    """Refuse to be the home of parameters whose values another process has."""
    here = [parameter for parameter, home in layout.homes.items() if home != META]
    lost = [parameter for parameter in here if is_in_another_process(parameter)]
    if lost:
        raise ValueError(
            "the parameters of a stage must have values in the process that runs it: got "
            f"{len(lost)} whose values another process has, from an earlier pipeline. Cut the "
            "model as before, or load its values from a checkpoint."
        )
