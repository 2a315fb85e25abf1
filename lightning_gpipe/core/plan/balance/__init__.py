"""Balances that the user need not count by hand: costs of layers, and the exact solver over them.

A pipeline is as fast as its slowest stage, so the balance decides its speed. What a layer costs
(``costs``) and which cut of those costs has the cheapest costliest stage (``solver``) are kept
apart; what comes out is a list of ints, to print, edit and write into a configuration.
"""

from lightning_gpipe.core.plan.balance.by_parameters import balance_by_parameters

__all__ = [
    "balance_by_parameters",
]
