"""Decides what runs where, and moves it there.

The layout is complete, and checked, before anything is moved.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lightning_gpipe.core.frontends import check_awaited, move, place, place_around
from lightning_gpipe.core.plan import Layout


def place_all(root: nn.Module, layouts: Sequence[Layout]) -> None:
    """Move the layers to their devices, and what is around them in ``root`` to its own.

    Raises:
        TypeError, ValueError: If tensors on the meta device cannot get their values.
    """
    check_awaited(root)
    layers = {
        layer for layout in layouts for partition in layout.partitions for layer in partition.layers
    }
    place_around(root, layers, layouts[0].outside)
    for layout in layouts:
        for j, partition in enumerate(layout.partitions):
            for layer in partition.layers:
                place(layer, layout.device_of(j))
    for layout in layouts:
        move_home(layout)


def move_home(layout: Layout) -> None:
    """Move parameters to their homes."""
    for parameter, device in layout.homes.items():
        if parameter.device != device:
            move(parameter, device)
