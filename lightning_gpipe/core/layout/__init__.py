"""Layouts: the partitions, the worker of each, and what they share, as data that print."""

from lightning_gpipe.core.layout.layout import (
    HOST,
    META,
    SHARDINGS,
    Around,
    Layout,
    ShardingName,
    Tie,
    Weights,
    check_around,
    check_devices,
    check_weights,
    lay_out,
    outside_stage,
    ties_of,
)
from lightning_gpipe.core.layout.module_attributes import (
    CONTAINERS,
    Holder,
    Slot,
    attributes_in,
    contents,
    holders,
    is_generator,
    is_user_object,
    parameter_holders,
    tensors_within,
    user_objects,
    with_tensors,
    within,
)
from lightning_gpipe.core.layout.module_kinds import PLAIN, kind_of, kind_of_tensor, structure_of
from lightning_gpipe.core.layout.nested import (
    balance_of_layers,
    groups_of,
    has_own_forward,
    hooks_of,
    is_plain,
    layers_of,
)
from lightning_gpipe.core.layout.partition import (
    Partition,
    check_balance,
    check_distinct,
    check_enough_layers,
    check_even,
    check_initialised,
    check_sequential,
    cut,
    layer_ranges,
    partitions_of,
    stages_of_layers,
)
from lightning_gpipe.core.layout.shards import (
    TENSOR_PARALLEL,
    check_order,
    check_whole,
    fsdp_groups,
    fsdp_modules,
    has_shards,
)
from lightning_gpipe.core.layout.sharing import (
    check_copies,
    check_outside,
    check_sharing,
    followed_slots,
    shared_with_outside,
)
