"""The balance as a table for people: what lies on which device.

A list of ints says little to someone who wonders why a device runs out of memory. The table names
for each stage its device, its layers by kind, and its share of all parameters, which also shows at
a glance when a balance is lopsided.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from rich.table import Table
from torch import nn

from lightning_gpipe.core.plan import Partition, parameter_costs


def listing(
    partitions: Sequence[Partition],
    devices: Sequence[torch.device],
    skips: Sequence[str] = (),
) -> Table:
    """List the stages, one row each::

        stage  device  layers  number  kinds                    parameters  share  skips to
            0  cuda:0    0..2       3  Embedding, Block x2         409,088  49.4%  1: 'x' 2 MiB
            1  cuda:1    3..6       4  Block x2, Norm, Linear      419,172  50.6%

    A parameter that stages share counts for the first of them, as it does for the balance.

    Args:
        partitions: The partitions of one module, first to last.
        devices: The device of each.
        skips: What to write about the skip tensors that leave each; none for no such column.
    """
    costs = parameter_costs(layer for partition in partitions for layer in partition.layers)
    table = Table()
    table.add_column("stage", justify="right")
    table.add_column("device")
    table.add_column("layers", justify="right")
    table.add_column("number", justify="right")
    table.add_column("kinds")
    table.add_column("parameters", justify="right")
    table.add_column("share", justify="right")
    if skips:
        table.add_column("skips to")
    for partition, device in zip(partitions, devices, strict=True):
        parameters = sum(costs[partition.first : partition.last + 1])
        table.add_row(
            str(partition.index),
            str(device),
            f"{partition.first}..{partition.last}",
            f"{len(partition.layers)}",
            _kinds(partition.layers),
            f"{parameters:,}",
            f"{parameters / max(sum(costs), 1):.1%}",
            *skips[partition.index : partition.index + 1],
        )
    return table


def _kinds(layers: Iterable[nn.Module]) -> str:
    """Name the kinds of layers in order of appearance, with their numbers: ``Linear x2, ReLU``."""
    counts = Counter(type(layer).__name__ for layer in layers)
    return ", ".join(f"{kind} x{count}" if count > 1 else kind for kind, count in counts.items())
