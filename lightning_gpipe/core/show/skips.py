"""The skip layout as a table: the layers and stages of each skip, and its bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.table import Table

from lightning_gpipe.core.plan import Partition, RouteName
from lightning_gpipe.core.skip import Skip, stages_of


def skip_table(
    skips: Iterable[Skip], partitions: Sequence[Partition], sizes: Mapping[RouteName, int]
) -> Table:
    """List the skip connections, one row each::

        name      stashed by  popped by  stages  crosses  bytes per micro-batch
        'detail'  layer 3     layer 18   0 -> 2  2        147,456
        'middle'  layer 7     layer 14   1       -

    Args:
        skips: The skip connections.
        partitions: The partitions of the module, first to last.
        sizes: The bytes of each skip tensor that was sent, if any was.
    """
    stage_of = stages_of(partitions)
    table = Table()
    for column in ("name", "stashed by", "popped by", "stages", "crosses"):
        table.add_column(column)
    table.add_column("bytes per micro-batch", justify="right")
    for skip in skips:
        source, target = stage_of[skip.stash], stage_of[skip.pop]
        size = sizes.get(skip.name)
        table.add_row(
            str(skip.name),
            f"layer {skip.stash}",
            f"layer {skip.pop}",
            f"{source}" if source == target else f"{source} -> {target}",
            "-" if source == target else f"{target - source}",
            "" if size is None else f"{size:,}",
        )
    return table
