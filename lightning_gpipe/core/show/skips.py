"""Shows the skip layout as a table: the layers and stages of each skip, and its bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.table import Column, Table

from lightning_gpipe.core.layout import Partition
from lightning_gpipe.core.programs import RouteName
from lightning_gpipe.core.skip import Skip, stages_of


def skip_table(
    skips: Iterable[Skip], partitions: Sequence[Partition], sizes: Mapping[RouteName, int]
) -> Table:
    """List the skip connections, one row each::

    name      stashed by  popped by  stages  crosses  bytes per micro-batch
    'detail'  layer 3     layer 18   0 -> 2  2        147,456
    'middle'  layer 7     layer 14   1       -
    """
    stage_of = stages_of(partitions)
    size = Column("bytes per micro-batch", justify="right")
    table = Table("name", "stashed by", "popped by", "stages", "crosses", size)
    for skip in skips:
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
