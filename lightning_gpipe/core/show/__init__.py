"""Tables: which layers are on which device, and where skip connections go.

This is the only room that draws on a terminal.
"""

from rich import print as show
from rich.table import Table

from lightning_gpipe.core.show.skips import skip_table
from lightning_gpipe.core.show.stages import stage_table

__all__ = [
    "Table",
    "show",
    "skip_table",
    "stage_table",
]
