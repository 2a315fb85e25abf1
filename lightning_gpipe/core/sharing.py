"""Refuses what stages cannot share, with one another or with what is around the pipeline.

Stages run at the same time, each on its device. A module that belongs to two of them would be run
by two threads at once, and a parameter or a buffer cannot be on two devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

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


def check_outside(
    root: nn.Module,
    inner: nn.Module,
    partitions: Sequence[Partition],
    devices: Sequence[torch.device],
    root_device: torch.device,
) -> None:
    """Raise if a stage shares a tensor with a module outside of the pipeline, across devices.

    Args:
        root: What the pipeline is part of.
        inner: The pipelined module.
        partitions: What each stage runs.
        devices: The device of each stage.
        root_device: Where everything outside of the pipeline is.

    Raises:
        ValueError: Names everything that is shared.
    """
    owners: dict[Any, int] = {
        tensor: partition.index
        for partition in partitions
        for layer in partition.layers
        for tensor in chain(layer.parameters(), layer.buffers())
    }
    faults = []
    for path, module in _outside(root, inner, ""):
        for name, tensor in chain(module._parameters.items(), module._buffers.items()):
            if tensor not in owners:
                continue
            j = owners[tensor]
            if devices[j] != root_device:
                faults.append(f"{path}{name} ({root_device}) is in stage {j} ({devices[j]})")
    if faults:
        raise ValueError(
            "a stage must not share tensors with a module on another device: got "
            f"{'; '.join(faults)}. What is outside of the pipeline is on the last stage's device: "
            "choose a balance that puts these layers into the last stage, or give each its own."
        )


def _outside(module: nn.Module, inner: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Every module that can be reached without passing through ``inner``, with its path."""
    if module is inner:
        return
    yield path, module
    for name, child in module.named_children():
        yield from _outside(child, inner, f"{path}{name}.")
