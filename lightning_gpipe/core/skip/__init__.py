"""Skip connections: tensors that go straight from the layer that makes them to one that uses them.

``declare`` is what a user writes, ``flight`` where tensors are between the two layers, ``layout``
the check of all declarations of a model and the routes between stages that follow from them.
"""

from lightning_gpipe.core.skip.declare import (
    Namespace,
    declared_in,
    isolate,
    pop,
    skippable,
    stash,
    with_skips,
)
from lightning_gpipe.core.skip.flight import SkipName, Table, carrying, in_flight
from lightning_gpipe.core.skip.layout import (
    Route,
    Skip,
    cleared,
    laid_out,
    routes_of,
    skips_of,
    stages_of,
    verify_skippables,
)

__all__ = [
    "Namespace",
    "Route",
    "Skip",
    "SkipName",
    "Table",
    "carrying",
    "cleared",
    "declared_in",
    "in_flight",
    "isolate",
    "laid_out",
    "pop",
    "routes_of",
    "skippable",
    "skips_of",
    "stages_of",
    "stash",
    "verify_skippables",
    "with_skips",
]
