"""Values that pass through a pipeline: pytrees, tensors, micro-batches and loss terms.

Nothing here depends on stages or devices.
"""

from lightning_gpipe.core.data.checksum import checksum
from lightning_gpipe.core.data.dtensors import (
    divided_like,
    from_shard,
    from_whole,
    is_uneven,
    shard_of,
    whole_of,
)
from lightning_gpipe.core.data.marks import (
    MARKS,
    PendingTensor,
    copy_marks,
    is_aliased,
    is_whole,
    mark_aliased,
    whole,
)
from lightning_gpipe.core.data.microbatch.merging import same_value
from lightning_gpipe.core.data.microbatch.microbatching import (
    Division,
    MicroBatching,
    check_chunks,
    check_microbatching,
)
from lightning_gpipe.core.data.microbatch.padded import PaddedSequences
from lightning_gpipe.core.data.microbatch.row_values import (
    has_entry_per_row,
    may_have_rows,
    plain,
)
from lightning_gpipe.core.data.microbatch.rows import Rows
from lightning_gpipe.core.data.pieces import loss_in_pieces
from lightning_gpipe.core.data.pytree import (
    LEAF_SPEC,
    FlatTree,
    change_tensors,
    is_registered,
    join,
    joined,
    map_instances,
    map_nodes,
    map_tensors,
    named_leaves,
    parted,
    spec_of,
    spec_parts,
    tensors_of,
    tree_flatten,
    tree_unflatten,
)
from lightning_gpipe.core.data.tensor_search import attributes, requires_grad, slot_names
from lightning_gpipe.core.data.tensors import (
    apart,
    bytes_of,
    copy_values,
    equal,
    has_own_dispatch,
    identity,
    memory,
    outline,
    overlap,
    record_stream,
)
from lightning_gpipe.core.data.terms import (
    Receiver,
    Term,
    collect_loss_terms,
    loss_term,
    receiving,
    reduced,
    refuse_means,
    term_receiver,
    trained_sums,
    warn_of_equal_sums,
)
