"""Balances that the user need not count by hand: costs of layers, and the exact solver over them.

A pipeline is as fast as its slowest stage, so the balance decides its speed. Finding one is two
questions that are kept apart: what a layer costs (``costs``), and which cut of those costs has the
cheapest costliest stage (``solver``). What comes out is a plain list of ints, which the user can
print, edit and write into a configuration.
"""

from __future__ import annotations

from torch import nn

from lightning_gpipe.core.plan.balance.costs import parameter_costs
from lightning_gpipe.core.plan.balance.solver import solve
from lightning_gpipe.core.plan.partition import check_enough_layers, check_sequential

__all__ = ["balance_by_parameters"]


def balance_by_parameters(module: nn.Sequential, stages: int) -> list[int]:
    """Balance the layers so that the stage with the most parameters has as few as possible.

    >>> balance_by_parameters(nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)]), stages=4)
    [2, 2, 1, 1]

    Parameters say well how much memory a stage needs, and how long it runs when the layers are of
    one kind; nothing is run, so the module may be on the ``meta`` device.

    Args:
        module: The layers to balance.
        stages: How many stages to balance them over.

    Returns:
        The number of layers of each stage, first to last.

    Raises:
        TypeError, ValueError: If the module cannot be cut, or not into so many stages.
    """
    check_sequential(module)
    check_enough_layers(len(module), stages)
    return solve(parameter_costs(module), stages)
