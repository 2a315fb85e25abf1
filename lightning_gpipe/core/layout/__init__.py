"""Layouts: the partitions, the worker of each, and what they share.

The worker of each stage, the device and the process of each worker are data that print.
"""

from lightning_gpipe.core.layout.layout import (
    META,
    Around,
    Layout,
    Tie,
    check_around,
    lay_out,
    ties_of,
)
from lightning_gpipe.core.layout.module_attributes import (
    CONTAINERS,
    Holder,
    attributes_in,
    contents,
    holders,
    is_generator,
    is_user_object,
    parameter_holders,
    tensors_within,
    within,
)
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
)
from lightning_gpipe.core.layout.shards import check_whole, has_shards
from lightning_gpipe.core.layout.sharing import (
    Slot,
    check_copies,
    check_outside,
    check_sharing,
    followed_slots,
    shared_with_outside,
)

__all__ = [
    "CONTAINERS",
    "META",
    "Around",
    "Holder",
    "Layout",
    "Partition",
    "Slot",
    "Tie",
    "attributes_in",
    "balance_of_layers",
    "check_around",
    "check_balance",
    "check_copies",
    "check_distinct",
    "check_enough_layers",
    "check_even",
    "check_initialised",
    "check_outside",
    "check_sequential",
    "check_sharing",
    "check_whole",
    "contents",
    "cut",
    "followed_slots",
    "groups_of",
    "has_own_forward",
    "has_shards",
    "holders",
    "hooks_of",
    "is_generator",
    "is_plain",
    "is_user_object",
    "lay_out",
    "layer_ranges",
    "layers_of",
    "parameter_holders",
    "partitions_of",
    "shared_with_outside",
    "tensors_within",
    "ties_of",
    "within",
]
