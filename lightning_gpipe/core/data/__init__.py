"""What passes through a pipeline: pytrees, their tensors, and how a batch is split and merged.

Nothing here depends on stages or devices.
"""

from lightning_gpipe.core.data.aliasing import identity, memory, overlap
from lightning_gpipe.core.data.holding import holds_tensor, requires_grad
from lightning_gpipe.core.data.layouts import bytes_of, copy_values, equal, record_stream
from lightning_gpipe.core.data.marks import (
    MARKS,
    copy_marks,
    is_aliased,
    is_whole,
    mark_aliased,
    whole,
)
from lightning_gpipe.core.data.microbatch.division import Division
from lightning_gpipe.core.data.microbatch.interface import (
    MicroBatching,
    check_chunks,
    check_microbatching,
)
from lightning_gpipe.core.data.microbatch.padded import PaddedSequences
from lightning_gpipe.core.data.microbatch.rows import Rows
from lightning_gpipe.core.data.pending import Pending
from lightning_gpipe.core.data.pytree import (
    LEAF_SPEC,
    FlatTree,
    join,
    joined,
    map_instances,
    map_tensors,
    named_leaves,
    parted,
    tree_flatten,
    tree_unflatten,
)
from lightning_gpipe.core.data.terms import (
    Term,
    collect_loss_terms,
    loss_term,
    receive_nothing,
    receiving,
    reduced,
    term_receiver,
)

__all__ = [
    "LEAF_SPEC",
    "MARKS",
    "Division",
    "FlatTree",
    "MicroBatching",
    "PaddedSequences",
    "Pending",
    "Rows",
    "Term",
    "bytes_of",
    "check_chunks",
    "check_microbatching",
    "collect_loss_terms",
    "copy_marks",
    "copy_values",
    "equal",
    "holds_tensor",
    "identity",
    "is_aliased",
    "is_whole",
    "join",
    "joined",
    "loss_term",
    "map_instances",
    "map_tensors",
    "mark_aliased",
    "memory",
    "named_leaves",
    "overlap",
    "parted",
    "receive_nothing",
    "receiving",
    "record_stream",
    "reduced",
    "requires_grad",
    "term_receiver",
    "tree_flatten",
    "tree_unflatten",
    "whole",
]
