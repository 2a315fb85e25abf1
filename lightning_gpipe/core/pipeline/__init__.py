"""The facade: from the user's model, a balance and devices to a model that runs as a pipeline.

:class:`GPipe` is what a user makes. It finds what to pipe in the model, by its type, places
everything, and calls the model as it is; :class:`Pipeline` is what runs micro-batches then.
"""

from lightning_gpipe.core.pipeline.gpipe import GPipe
from lightning_gpipe.core.pipeline.pipeline import Pipeline
from lightning_gpipe.core.pipeline.taken import Check, Layers, Programs, Taken, checked
from lightning_gpipe.core.pipeline.taking import (
    balance_of_each,
    balances_for,
    parameters_around,
    take_all,
    taken_at,
)

__all__ = [
    "Check",
    "GPipe",
    "Layers",
    "Pipeline",
    "Programs",
    "Taken",
    "balance_of_each",
    "balances_for",
    "checked",
    "parameters_around",
    "take_all",
    "taken_at",
]
