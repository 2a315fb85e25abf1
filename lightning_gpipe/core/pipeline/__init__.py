"""The facade: from the user's model, a balance and devices to a model that runs as a pipeline.

:class:`GPipe` is what a user makes. It finds what to pipe in the model, by its type, places
everything, and calls the model as it is; :class:`Pipeline` is what runs micro-batches then.
"""

from lightning_gpipe.core.pipeline.balancing import (
    FOUND,
    balance_of_each,
    balances_for,
    is_found,
    parameters_around,
)
from lightning_gpipe.core.pipeline.by_measure import balance_by_memory, balance_by_time
from lightning_gpipe.core.pipeline.given import AUTO, Choice, Given
from lightning_gpipe.core.pipeline.gpipe import GPipe
from lightning_gpipe.core.pipeline.measuring import Measuring, profile
from lightning_gpipe.core.pipeline.pipeline import Handles, Pipeline
from lightning_gpipe.core.pipeline.planning import chosen, plan, profiles_of, rows_of
from lightning_gpipe.core.pipeline.sampling import Entry, calling, entries_of, entries_with
from lightning_gpipe.core.pipeline.stepping import Outcome, Stepping
from lightning_gpipe.core.pipeline.taken import Check, Layers, Programs, Taken, checked
from lightning_gpipe.core.pipeline.taking import (
    laid_out,
    take_all,
    taken_at,
)

__all__ = [
    "AUTO",
    "FOUND",
    "Check",
    "Choice",
    "Entry",
    "GPipe",
    "Given",
    "Handles",
    "Layers",
    "Measuring",
    "Outcome",
    "Pipeline",
    "Programs",
    "Stepping",
    "Taken",
    "balance_by_memory",
    "balance_by_time",
    "balance_of_each",
    "balances_for",
    "calling",
    "checked",
    "chosen",
    "entries_of",
    "entries_with",
    "is_found",
    "laid_out",
    "parameters_around",
    "plan",
    "profile",
    "profiles_of",
    "rows_of",
    "take_all",
    "taken_at",
]
