"""Skip connections: tensors sent directly from the layer that makes them to a later layer.

``declare`` has what a user writes, ``flight`` holds the tensors between the two layers, ``layout``
checks all declarations of a model and derives the routes between stages from them.
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
from lightning_gpipe.core.skip.flight import Table, in_flight, using_table
from lightning_gpipe.core.skip.layout import (
    Skip,
    leaving_in,
    routes_of,
    skips_of,
    stages_of,
    table_of,
    verify_skippables,
)

__all__ = [
    "Namespace",
    "Skip",
    "Table",
    "declared_in",
    "in_flight",
    "isolate",
    "leaving_in",
    "pop",
    "routes_of",
    "skippable",
    "skips_of",
    "stages_of",
    "stash",
    "table_of",
    "using_table",
    "verify_skippables",
    "with_skips",
]
