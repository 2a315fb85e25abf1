"""Refuses what two stages cannot share.

Stages run at the same time, each on its device. A module that belongs to two of them would be run
by two threads at once, and a parameter or a buffer cannot be on two devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from lightning_gpipe.core.partition import Partition


def check_sharing(partitions: Sequence[Partition], devices: Sequence[torch.device]) -> None:
    """Raise if stages share a module, or a tensor across devices.

    Args:
        partitions: What each stage runs.
        devices: The device of each stage.

    Raises:
        ValueError: Names everything that is shared, and by which layers.
    """
    owners: dict[Any, tuple[int, str]] = {}
    faults: dict[str, None] = {}
    for partition in partitions:
        j = partition.index
        for k, layer in enumerate(partition.layers, start=partition.first):
            for name, module in layer.named_modules():
                path = f"layer {k}{'.' + name if name else ''}"
                owner, where = owners.setdefault(module, (j, path))
                if owner != j:
                    faults[f"module {where} (stage {owner}) is {path} (stage {j})"] = None
            for name, tensor in chain(
                layer.named_parameters(remove_duplicate=False),
                layer.named_buffers(remove_duplicate=False),
            ):
                path = f"layer {k}.{name}"
                owner, where = owners.setdefault(tensor, (j, path))
                if devices[owner] != devices[j]:
                    faults[f"{where} ({devices[owner]}) is {path} ({devices[j]})"] = None
    if faults:
        raise ValueError(
            f"stages must not share modules, nor tensors across devices: got {'; '.join(faults)}. "
            "Choose a balance that puts these layers into one stage, or give each its own."
        )
