"""The balance as a table: which layers are on which device.

A list of ints does not tell a user why a device runs out of memory. The table has the device of
each stage, its layers by kind and its share of all parameters, which also shows an uneven balance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from rich.table import Table
from torch import nn

from lightning_gpipe.core.plan import Layout, RouteName, StageCosts, parameter_costs


def stage_table(
    layouts: Sequence[Layout],
    skip_bytes: Mapping[RouteName, int],
    measured: Sequence[StageCosts] = (),
) -> Table:
    """List the stages, one row each::

        stage  device  layers  number  kinds                    parameters  share  skips to
            0  cuda:0    0..2       3  Embedding, Block x2         409,088  49.4%  1: 'x' (2 MiB)
            1  cuda:1    3..6       4  Block x2, Norm, Linear      419,172  50.6%

    Layers that have names are listed by them. A parameter that stages share counts for the first
    of them, as it does for the balance.

    Args:
        layouts: What runs where; of several pipelines in one model, one after another.
        skip_bytes: The bytes of each skip tensor that was sent, if any was.
        measured: What each stage costs, if that was measured: further columns.
    """
    rows = [(layout, j) for layout in layouts for j in range(layout.n)]
    costs = iter(parameter_costs(x for layout, j in rows for x in layout.partitions[j].layers))
    sizes = [sum(islice(costs, len(layout.partitions[j].layers))) for layout, j in rows]
    skips = any(layout.routes for layout in layouts)
    table = Table()
    table.add_column("stage", justify="right")
    table.add_column("device")
    table.add_column("layers", justify="right")
    table.add_column("number", justify="right")
    table.add_column("kinds")
    table.add_column("parameters", justify="right")
    table.add_column("share", justify="right")
    for column in measured[0].columns if measured else ():
        table.add_column(column, justify="right")
    if skips:
        table.add_column("skips to")
    for (layout, j), parameters in zip(rows, sizes, strict=True):
        partition = layout.partitions[j]
        table.add_row(
            str(j),
            layout.where(j),
            str(partition) if partition.names else f"{partition.first}..{partition.last}",
            f"{len(partition.layers)}",
            _kinds(partition.layers),
            f"{parameters:,}",
            f"{parameters / max(sum(sizes), 1):.1%}",
            *(measured[len(table.rows)].cells if measured else ()),
            *(["\n".join(_leaving(layout, j, skip_bytes))] if skips else []),
        )
    return table


def _leaving(layout: Layout, j: int, skip_bytes: Mapping[RouteName, int]) -> Iterator[str]:
    """The skip tensors that leave a stage, with their sizes once a micro-batch has run."""
    for route in layout.leaving(j):
        size = skip_bytes.get(route.name)
        yield f"{route.target}: {route.name}" + ("" if size is None else f" ({size:,} B)")


def _kinds(layers: Iterable[nn.Module]) -> str:
    """Name the kinds of layers in order of appearance, with their numbers: ``Linear x2, ReLU``."""
    counts = Counter(type(layer).__name__ for layer in layers)
    return ", ".join(f"{kind} x{count}" if count > 1 else kind for kind, count in counts.items())
