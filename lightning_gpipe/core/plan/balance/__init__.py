"""Finds balances: the costs of layers, and the exact solver over them.

A pipeline is as fast as its slowest stage, so the balance decides its speed. The cost of each layer
(``costs``) is separate from the search for the cut whose costliest stage is cheapest (``solver``).
The result is a list of ints, to print, edit and write into a configuration.
"""

from lightning_gpipe.core.plan.balance.by_parameters import balance_by_parameters

__all__ = [
    "balance_by_parameters",
]
