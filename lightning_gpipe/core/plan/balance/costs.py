"""The cost of each layer.

A cost is a number for each layer that adds up over a stage; its unit does not matter to the solver.
The number of parameters is known before anything has run, and is counted, not measured, so every
process and every run of a job finds the same balance.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def parameter_costs(layers: Iterable[nn.Module]) -> list[int]:
    """Count the elements of each layer's parameters.

    A parameter that several layers share is counted once, in the first of them: that stage owns it,
    and counting it again would make the costs add up to more than the model.
    """
    seen: set[nn.Parameter] = set()
    costs = []
    for layer in layers:
        new = [p for p in layer.parameters() if p not in seen]
        costs.append(sum(p.numel() for p in new))
        seen.update(new)
    return costs
