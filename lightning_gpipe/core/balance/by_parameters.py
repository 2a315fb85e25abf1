"""Finds the balance whose largest stage has as few parameters as possible."""

from __future__ import annotations

from torch import nn

from lightning_gpipe.core.balance.costs import parameter_costs
from lightning_gpipe.core.balance.solver import solve
from lightning_gpipe.core.layout import check_enough_layers, check_sequential, layers_of


def balance_by_parameters(module: nn.Sequential, stages: int) -> list[int]:
    """Balance the layers so that the stage with the most parameters has as few as possible.

    >>> balance_by_parameters(nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)]), stages=4)
    [2, 2, 1, 1]

    The number of parameters is a good measure of the memory of a stage, and of its running time if
    the layers are of one kind. No layer is run, so the module may be on the ``meta`` device.

    Args:
        module: The layers to balance.
        stages: The number of stages.

    Returns:
        The number of layers of each stage, first to last.

    Raises:
        TypeError, ValueError: If the module cannot be cut, or not into this number of stages.
    """
    check_sequential(module)
    layers = layers_of(module)
    check_enough_layers(len(layers), stages)
    return solve(parameter_costs(layers.values()), stages)
