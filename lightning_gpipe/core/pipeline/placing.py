"""Decides what runs where, and moves it there.

The layout is complete, and checked, before anything is moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from lightning_gpipe.core.frontends import (
    check_awaited,
    choose_devices,
    move,
    place,
    place_around,
)
from lightning_gpipe.core.plan import (
    Layout,
    Partition,
    check_outside,
    check_sharing,
    lay_out,
    shared_with_outside,
)
from lightning_gpipe.core.skip import routes_of, skips_of


def layout_of(
    partitions: Sequence[Partition], devices: Sequence[str | torch.device] | None
) -> Layout:
    """The layout of these partitions on the devices that the user gave, if any.

    Raises:
        TypeError, ValueError: If the devices do not fit, or stages share what they must not.
    """
    layers = [layer for partition in partitions for layer in partition.layers]
    chosen = choose_devices(devices, len(partitions))
    layout = lay_out(partitions, chosen, routes_of(skips_of(layers, partitions), partitions))
    check_sharing(layout)
    return layout


def place_all(root: nn.Module, layouts: Sequence[Layout]) -> None:
    """Move the layers to their devices, and what is around them in ``root`` to the last one.

    Raises:
        TypeError, ValueError: If tensors on the meta device cannot get their values.
    """
    check_awaited(root)
    layers = {
        layer for layout in layouts for partition in layout.partitions for layer in partition.layers
    }
    place_around(root, layers, layouts[0].devices[-1])
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


def with_around(
    layout: Layout, root: nn.Module, module: nn.Module, own: Iterable[nn.Parameter]
) -> Layout:
    """The same layout, in which the last device is the home of what is used around the layers too.

    Args:
        layout: What runs where.
        root: The user's model.
        module: The module in it that runs as a pipeline.
        own: Parameters of the module that no layer has.

    Raises:
        ValueError: If modules around it have a buffer of a stage on another device.
    """
    last = layout.device_of(layout.n - 1)
    check_outside(root, module, layout, last)
    return layout.with_homes(dict.fromkeys([*own, *shared_with_outside(root, module)], last))
