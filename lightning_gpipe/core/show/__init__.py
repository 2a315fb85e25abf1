"""Tables and pictures of stages, skip connections, plans and timelines.

This is the only room that draws, on a terminal or into a file.
"""

from rich.table import Table

from lightning_gpipe.core.show.picture import (
    INSTALL,
    can_draw,
    check_can_draw_to,
    timeline_picture,
)
from lightning_gpipe.core.show.plans import plan_picture, show_plan
from lightning_gpipe.core.show.stages import skip_table, stage_table
from lightning_gpipe.core.show.trace import Slice, TracedRun, trace_of
