"""Makes a stage compute what the plain module computes, on another thread and when recomputed.

Each module here handles one thing that would otherwise go wrong silently: thread-local state,
random numbers, buffers, in-place edits, running statistics, gradients that arrive in parts.
"""

from lightning_gpipe.core.faithful.batchnorm import (
    DeferredStatistics,
    Norm,
    check_batch_norms,
    rows_needed,
)
from lightning_gpipe.core.faithful.behavior import Behavior, Behaviors, TrainingFlags
from lightning_gpipe.core.faithful.buffers import Buffers
from lightning_gpipe.core.faithful.compilation import not_compiled
from lightning_gpipe.core.faithful.contents import Contents
from lightning_gpipe.core.faithful.context import Context, on_engine_thread
from lightning_gpipe.core.faithful.inplace import MutationGuard
from lightning_gpipe.core.faithful.journal import Attributes, Journal, Write
from lightning_gpipe.core.faithful.library_generators import (
    LibraryGenerators,
    LibrarySnapshot,
    LibraryState,
)
from lightning_gpipe.core.faithful.managers import NOTHING, Manager, together
from lightning_gpipe.core.faithful.modes import (
    ThreadState,
    refuse_cached_parametrizations,
    refuse_function_transforms,
)
from lightning_gpipe.core.faithful.notes import add_note
from lightning_gpipe.core.faithful.preserved import preserved
from lightning_gpipe.core.faithful.randomness import (
    OwnGenerators,
    Randomness,
    SharedGenerators,
)
from lightning_gpipe.core.faithful.recomputing import RECOMPUTING, is_recomputing
from lightning_gpipe.core.faithful.redirect import default_generator
from lightning_gpipe.core.faithful.row_watch import RowWatch, RowWatches
from lightning_gpipe.core.faithful.shadow import NO_VALUES, Shadows, has_hooks
from lightning_gpipe.core.faithful.state import AttributesPreserved, Saved, Snapshot, StageState
from lightning_gpipe.core.faithful.streams import Streams
from lightning_gpipe.core.faithful.tracing import is_traced

__all__ = [
    "NOTHING",
    "NO_VALUES",
    "RECOMPUTING",
    "Attributes",
    "AttributesPreserved",
    "Behavior",
    "Behaviors",
    "Buffers",
    "Contents",
    "Context",
    "DeferredStatistics",
    "Journal",
    "LibraryGenerators",
    "LibrarySnapshot",
    "LibraryState",
    "Manager",
    "MutationGuard",
    "Norm",
    "OwnGenerators",
    "Randomness",
    "RowWatch",
    "RowWatches",
    "Saved",
    "Shadows",
    "SharedGenerators",
    "Snapshot",
    "StageState",
    "Streams",
    "ThreadState",
    "TrainingFlags",
    "Write",
    "add_note",
    "check_batch_norms",
    "default_generator",
    "has_hooks",
    "is_recomputing",
    "is_traced",
    "not_compiled",
    "on_engine_thread",
    "preserved",
    "refuse_cached_parametrizations",
    "refuse_function_transforms",
    "rows_needed",
    "together",
]
