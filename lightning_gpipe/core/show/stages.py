"""Shows a layout as tables: the layers on each device, and the skip connections."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

from rich.table import Column, Table
from torch import nn

from lightning_gpipe.core.balance import StageCosts, parameter_costs, sums_of
from lightning_gpipe.core.layout import Layout, stages_of_layers
from lightning_gpipe.core.programs import RouteName
from lightning_gpipe.core.show.plans import time_cell, time_unit
from lightning_gpipe.core.skip import skips_of


def stage_table(
    layouts: Sequence[Layout],
    skip_bytes: Mapping[RouteName, int],
    measured: Sequence[StageCosts] = (),
) -> Table:
    """List the stages, one row each::

        stage  device  layers  number  kinds                    parameters  share  skips to
            0  cuda:0    0..2       3  Embedding, Block x2         409,088  49.4%  1: 'x' (2 MiB)
            1  cuda:1    3..6       4  Block x2, Norm, Linear      419,172  50.6%

    Layers with names are listed by them. A parameter that stages share counts for the first of
    them, as it does for the balance. Measured costs take the place of kinds and shares: a console
    of 80 columns has no space for all.
    """
    rows = [(layout, j) for layout in layouts for j in range(layout.n)]
    costs = parameter_costs(x for layout, j in rows for x in layout.partitions[j].layers)
    sizes = sums_of(costs, [len(layout.partitions[j].layers) for layout, j in rows])
    skips = any(layout.routes for layout in layouts)
    right = partial(Column, justify="right", no_wrap=True)
    folded = partial(Column, overflow="fold")  # in a narrow console these become narrower
    layers = folded("layers", justify="right")
    columns = [right("stage"), Column("device", no_wrap=True), layers, right("number")]
    if measured:
        columns += map(right, ("parameters", time_unit(measured[0].unit), "MiB"))
    else:
        columns += [folded("kinds"), right("parameters"), right("share")]
    table = Table(*columns, *([folded("skips to")] if skips else []))
    for (layout, j), parameters in zip(rows, sizes, strict=True):
        partition = layout.partitions[j]
        cells = [str(j), layout.where(j), partition.span, f"{len(partition.layers)}"]
        if measured:
            cells += [f"{parameters:,}", *_cells(measured[len(table.rows)])]
        else:
            share = parameters / max(sum(sizes), 1)
            cells += [_kinds(partition.layers), f"{parameters:,}", f"{share:.1%}"]
        table.add_row(*cells, *(["\n".join(_leaving(layout, j, skip_bytes))] if skips else []))
    return table


def skip_table(layout: Layout, sizes: Mapping[RouteName, int]) -> Table:
    """List the skip connections, one row each::

    name      stashed by  popped by  stages  crosses  bytes per micro-batch
    'detail'  layer 3     layer 18   0 -> 2  2        147,456
    'middle'  layer 7     layer 14   1       -
    """
    stage_of = stages_of_layers(layout.partitions)
    size = Column("bytes per micro-batch", justify="right")
    table = Table("name", "stashed by", "popped by", "stages", "crosses", size)
    for skip in skips_of(layout.layers):
        source, target = stage_of[skip.stash], stage_of[skip.pop]
        number = sizes.get(skip.name)
        table.add_row(
            str(skip.name),
            f"layer {skip.stash}",
            f"layer {skip.pop}",
            f"{source}" if source == target else f"{source} -> {target}",
            "-" if source == target else f"{target - source}",
            "" if number is None else f"{number:,}",
        )
    return table


def _cells(costs: StageCosts) -> tuple[str, str]:
    return time_cell(costs.time, costs.unit), f"{costs.memory / 2**20:,.1f}"


def _leaving(layout: Layout, j: int, skip_bytes: Mapping[RouteName, int]) -> Iterator[str]:
    for route in layout.leaving(j):
        size = skip_bytes.get(route.name)
        yield f"{route.target}: {route.name}" + ("" if size is None else f" ({size:,} B)")


def _kinds(layers: Iterable[nn.Module]) -> str:
    """The kinds of layers in order of appearance, with their numbers: ``Linear x2, ReLU``."""
    counts = Counter(type(layer).__name__ for layer in layers)
    return ", ".join(f"{kind} x{count}" if count > 1 else kind for kind, count in counts.items())
