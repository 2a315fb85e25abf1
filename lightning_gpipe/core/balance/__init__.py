"""Finds balances: the costs of layers, and the exact solver over them.

The cost of each layer is separate from the search for the cut whose costliest stage is cheapest.
"""

from lightning_gpipe.core.balance.by_profile import (
    Shift,
    StageCosts,
    memory_costs,
    recomputing,
    shift_for,
    stage_costs,
    time_costs,
)
from lightning_gpipe.core.balance.costs import LayerCosts, Place, parameter_costs, sums_of
from lightning_gpipe.core.balance.profiles import (
    CarriedValue,
    LayerProfile,
    LinearCost,
    ModelProfile,
)
from lightning_gpipe.core.balance.solver import NothingFits, solve, solve_on
