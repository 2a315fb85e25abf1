"""Schedules: the actions of each worker, in order, as tables that print.

A schedule is simulated for deadlocks and its bubble, and it is the very object that workers run.
"""

from lightning_gpipe.core.schedules.action import (
    CALLER,
    Action,
    Kind,
    Row,
    Span,
    predecessors,
    successor,
)
from lightning_gpipe.core.schedules.host_moves import (
    OffloadActivations,
    activation_moves,
    check_offload_activations,
    offloaded_by_stage,
    weight_moves,
    weight_moves_at_once,
)
from lightning_gpipe.core.schedules.patterns import Pattern
from lightning_gpipe.core.schedules.placement import counted, folded, looped
from lightning_gpipe.core.schedules.recompute import (
    ActivationCheckpointing,
    check_activation_checkpointing,
    held_at_once,
    recomputed_by_stage,
)
from lightning_gpipe.core.schedules.schedule import Schedule
from lightning_gpipe.core.schedules.schedule_blocks import Block, as_block
from lightning_gpipe.core.schedules.table import (
    FILL_DRAIN,
    KINDS,
    SCHEDULES,
    AnySchedule,
    ByMicroBatch,
    ScheduleKind,
    ScheduleName,
    check_by_micro_batch,
    check_planned,
    check_schedule,
    fill_drain,
    is_by_micro_batch,
    is_folded,
    is_possible,
    kinds_for,
    schedule_for,
)
