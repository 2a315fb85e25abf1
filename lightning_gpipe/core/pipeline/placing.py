"""Decides what runs where, and moves it there.

The layout is complete, and checked, before anything is moved.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lightning_gpipe.core.frontends import (
    check_awaited,
    forget,
    forget_values,
    move,
    place,
    place_around,
)
from lightning_gpipe.core.plan import META, Layout


def place_all(root: nn.Module, layouts: Sequence[Layout]) -> None:
    """Move the layers to their devices, and what is around them in ``root`` to its own.

    Layers of other processes are moved to the meta device.

    Raises:
        TypeError, ValueError: If tensors on the meta device cannot get their values.
    """
    check_awaited(root)
    layers = {
        layer for layout in layouts for partition in layout.partitions for layer in partition.layers
    }
    place_around(root, layers, layouts[0].outside)
    for layout in layouts:
        kept = {id(p) for p, home in layout.homes.items() if home != META}
        forgotten: set[int] = set()
        for j, partition in enumerate(layout.partitions):
            for layer in partition.layers:
                if layout.owner_of(j) == layout.rank:
                    place(layer, layout.device_of(j), forgotten)
                else:
                    forget(layer, kept, forgotten)
    for layout in layouts:
        move_home(layout)


def move_home(layout: Layout) -> None:
    """Move parameters to their homes."""
    for parameter, device in layout.homes.items():
        if device == META:
            forget_values(parameter)
        elif parameter.device != device:
            move(parameter, device)
