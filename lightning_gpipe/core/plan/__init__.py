"""What is decided without tensors, as values that print: partitions, balances, schedules.

What is shown, simulated and tested here is the same object that runs.
"""

from lightning_gpipe.core.plan.balance.by_parameters import balance_by_parameters
from lightning_gpipe.core.plan.balance.costs import parameter_costs
from lightning_gpipe.core.plan.partition import Partition, check_balance, check_sequential, cut
from lightning_gpipe.core.plan.recompute import Mode, check_mode, count_recomputed
from lightning_gpipe.core.plan.schedule import Action, Kind, Schedule, fill_drain, successor
from lightning_gpipe.core.plan.sharing import (
    Slot,
    check_outside,
    check_sharing,
    homes,
    places_away,
    shared_with_outside,
)

__all__ = [
    "Action",
    "Kind",
    "Mode",
    "Partition",
    "Schedule",
    "Slot",
    "balance_by_parameters",
    "check_balance",
    "check_mode",
    "check_outside",
    "check_sequential",
    "check_sharing",
    "count_recomputed",
    "cut",
    "fill_drain",
    "homes",
    "parameter_costs",
    "places_away",
    "shared_with_outside",
    "successor",
]
