"""Skip connections: tensors sent directly from the layer that makes them to a later layer.

``declare`` has the decorators for the user's layers, and holds the tensors between two of them;
``skip_layout`` checks all declarations of a model and derives the routes between stages.
"""

from lightning_gpipe.core.skip.declare import (
    Namespace,
    Table,
    declaration_of,
    in_flight,
    isolate,
    pop,
    skippable,
    stash,
    using_table,
    with_skips,
)
from lightning_gpipe.core.skip.skip_layout import (
    leaving_tensors,
    routes_of,
    skips_of,
    table_of,
    verify_skippables,
)
