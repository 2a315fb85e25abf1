"""Skip connections: tensors sent directly from the layer that makes them to a later layer.

``declare`` has the decorators for the user's layers, ``flight`` holds the tensors between the two
layers, ``skip_layout`` checks all declarations of a model and derives the routes between stages.
"""

from lightning_gpipe.core.skip.declare import (
    Namespace,
    declaration_of,
    isolate,
    pop,
    skippable,
    stash,
    with_skips,
)
from lightning_gpipe.core.skip.flight import Table, in_flight, using_table
from lightning_gpipe.core.skip.skip_layout import (
    Skip,
    leaving_tensors,
    routes_of,
    skips_of,
    stages_of,
    table_of,
    verify_skippables,
)
