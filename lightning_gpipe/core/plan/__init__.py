"""What is decided without tensors, as values that print: partitions, balances, schedules.

What is shown, simulated and tested here is the same object that runs.
"""

from lightning_gpipe.core.plan.action import Action, Kind, predecessors, successor
from lightning_gpipe.core.plan.advice import Change, changes, doubts
from lightning_gpipe.core.plan.balance.by_names import counts_between
from lightning_gpipe.core.plan.balance.by_parameters import balance_by_parameters
from lightning_gpipe.core.plan.balance.by_profile import (
    StageCosts,
    memory_costs,
    stage_costs,
    time_costs,
)
from lightning_gpipe.core.plan.balance.costs import LayerCosts, Place, parameter_costs
from lightning_gpipe.core.plan.balance.shift import Shift, shift_for
from lightning_gpipe.core.plan.balance.solver import solve, solve_on
from lightning_gpipe.core.plan.by_micro_batch import (
    ByMicroBatch,
    by_micro_batch,
    check_by_micro_batch,
)
from lightning_gpipe.core.plan.fill_drain import fill_drain
from lightning_gpipe.core.plan.held import (
    CONTAINERS,
    Holder,
    contents,
    held_in,
    holders,
    is_generator,
    is_own,
    parameter_holders,
    within,
)
from lightning_gpipe.core.plan.layout import (
    META,
    Around,
    Layout,
    Placing,
    Tie,
    check_around,
    check_even,
    folded,
    lay_out,
    looped,
    one_each,
    ties_of,
)
from lightning_gpipe.core.plan.measured import Carried, LayerProfile, ModelProfile, PerRow, slowest
from lightning_gpipe.core.plan.no_plan import NoPlan
from lightning_gpipe.core.plan.orders import (
    ALWAYS_SPLIT,
    ORDERS,
    Order,
    ScheduleName,
    check_planned,
    check_schedule_name,
    orders_for,
)
from lightning_gpipe.core.plan.partition import (
    Partition,
    check_balance,
    check_enough_layers,
    check_sequential,
    cut,
    has_own_forward,
    is_plain,
)
from lightning_gpipe.core.plan.planner import Alternative, Plan, plan_for
from lightning_gpipe.core.plan.predicted_stage import Memory, StagePrediction
from lightning_gpipe.core.plan.prediction import Planned, Prediction
from lightning_gpipe.core.plan.program import Part, Program
from lightning_gpipe.core.plan.recompute import (
    ActivationCheckpointing,
    check_activation_checkpointing,
    count_recomputed,
)
from lightning_gpipe.core.plan.route import (
    CALLER,
    Route,
    RouteName,
    SkipName,
    Value,
    Values,
    sender,
)
from lightning_gpipe.core.plan.schedule import Schedule
from lightning_gpipe.core.plan.settings import Settings
from lightning_gpipe.core.plan.shards import check_whole, has_shards
from lightning_gpipe.core.plan.sharing import (
    Slot,
    check_copies,
    check_outside,
    check_sharing,
    followed_slots,
    shared_with_outside,
)
from lightning_gpipe.core.plan.stage_cost import parts_of, sizes_of
from lightning_gpipe.core.plan.step import Method, Step

__all__ = [
    "ALWAYS_SPLIT",
    "CALLER",
    "CONTAINERS",
    "META",
    "ORDERS",
    "Action",
    "ActivationCheckpointing",
    "Alternative",
    "Around",
    "ByMicroBatch",
    "Carried",
    "Change",
    "Holder",
    "Kind",
    "LayerCosts",
    "LayerProfile",
    "Layout",
    "Memory",
    "Method",
    "ModelProfile",
    "NoPlan",
    "Order",
    "Part",
    "Partition",
    "PerRow",
    "Place",
    "Placing",
    "Plan",
    "Planned",
    "Prediction",
    "Program",
    "Route",
    "RouteName",
    "Schedule",
    "ScheduleName",
    "Settings",
    "Shift",
    "SkipName",
    "Slot",
    "StageCosts",
    "StagePrediction",
    "Step",
    "Tie",
    "Value",
    "Values",
    "balance_by_parameters",
    "by_micro_batch",
    "changes",
    "check_activation_checkpointing",
    "check_around",
    "check_balance",
    "check_by_micro_batch",
    "check_copies",
    "check_enough_layers",
    "check_even",
    "check_outside",
    "check_planned",
    "check_schedule_name",
    "check_sequential",
    "check_sharing",
    "check_whole",
    "contents",
    "count_recomputed",
    "counts_between",
    "cut",
    "doubts",
    "fill_drain",
    "folded",
    "followed_slots",
    "has_own_forward",
    "has_shards",
    "held_in",
    "holders",
    "is_generator",
    "is_own",
    "is_plain",
    "lay_out",
    "looped",
    "memory_costs",
    "one_each",
    "orders_for",
    "parameter_costs",
    "parameter_holders",
    "parts_of",
    "plan_for",
    "predecessors",
    "sender",
    "shared_with_outside",
    "shift_for",
    "sizes_of",
    "slowest",
    "solve",
    "solve_on",
    "stage_costs",
    "successor",
    "ties_of",
    "time_costs",
    "within",
]
