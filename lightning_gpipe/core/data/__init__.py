"""What travels through a pipeline: nested values, their tensors, and how a batch is cut and merged.

Nothing here knows of stages or devices.
"""

from lightning_gpipe.core.data.aliasing import identity, memory, overlap
from lightning_gpipe.core.data.marks import (
    copy_marks,
    is_elsewhere,
    is_whole,
    mark_elsewhere,
    whole,
)
from lightning_gpipe.core.data.microbatch.interface import MicroBatching
from lightning_gpipe.core.data.microbatch.padded import PaddedSequences
from lightning_gpipe.core.data.microbatch.rows import Rows
from lightning_gpipe.core.data.pytree import (
    FlatTree,
    map_tensors,
    named_leaves,
    tree_flatten,
    tree_unflatten,
)

__all__ = [
    "FlatTree",
    "MicroBatching",
    "PaddedSequences",
    "Rows",
    "copy_marks",
    "identity",
    "is_elsewhere",
    "is_whole",
    "map_tensors",
    "mark_elsewhere",
    "memory",
    "named_leaves",
    "overlap",
    "tree_flatten",
    "tree_unflatten",
    "whole",
]
