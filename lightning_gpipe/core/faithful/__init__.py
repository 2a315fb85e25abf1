"""Makes a stage compute what the plain module computes, on another thread and when recomputed.

Each module here handles one thing that would otherwise go wrong silently: thread-local state,
random numbers, buffers, in-place edits, running statistics, gradients that arrive in parts.
"""

from lightning_gpipe.core.faithful.journal import ABSENT, Attributes, Journal, Write, patched
from lightning_gpipe.core.faithful.layers.batch_dimension import RowWatch, RowWatches
from lightning_gpipe.core.faithful.layers.batchnorm import (
    DeferredStatistics,
    Norm,
    check_batch_norms,
    over_replicas,
    rows_needed,
)
from lightning_gpipe.core.faithful.layers.mixed_dims import mixed_by
from lightning_gpipe.core.faithful.layers.replicated_norm import Gather
from lightning_gpipe.core.faithful.managers import (
    NOTHING,
    Bracket,
    Closing,
    LazyManagers,
    Manager,
    setting,
    together,
)
from lightning_gpipe.core.faithful.notes import add_note, modules_raising
from lightning_gpipe.core.faithful.parameter_leaves import (
    has_memory,
    leaf_like,
    parts_of,
    placeholder,
)
from lightning_gpipe.core.faithful.random.generators import Randomness, SharedGenerators
from lightning_gpipe.core.faithful.random.library_watch import LibraryDraws, LibraryWatch
from lightning_gpipe.core.faithful.random.private_generators import (
    AboutToDraw,
    WithoutDraws,
    default_generator,
    drawing_by_default,
)
from lightning_gpipe.core.faithful.random.random_state import (
    LIBRARIES,
    ForeignGenerator,
    RandomState,
)
from lightning_gpipe.core.faithful.random.reproducible import RandomDraws
from lightning_gpipe.core.faithful.shadow import Shadows, has_hooks
from lightning_gpipe.core.faithful.state.behavior import Behavior, record, version_of
from lightning_gpipe.core.faithful.state.buffers import BufferState
from lightning_gpipe.core.faithful.state.changes import Changes
from lightning_gpipe.core.faithful.state.contents import (
    Contents,
    SavedArray,
    SavedContainer,
    saved_within,
    set_elements,
)
from lightning_gpipe.core.faithful.state.inplace import MutationGuard
from lightning_gpipe.core.faithful.state.parameters import parameters_preserved
from lightning_gpipe.core.faithful.state.stage_state import ModuleState, StageState, preserved
from lightning_gpipe.core.faithful.thread.context import (
    NO_HOOKS,
    Autocast,
    Context,
    Hooks,
    on_engine_thread,
    saved_tensors_hooks,
    without_checkpointing,
)
from lightning_gpipe.core.faithful.thread.modes import (
    ThreadState,
    intra_op_threads,
    refuse_unsupported_modes,
)
from lightning_gpipe.core.faithful.thread.recomputing import RECOMPUTING, is_recomputing
from lightning_gpipe.core.faithful.thread.streams import Streams
from lightning_gpipe.core.faithful.thread.tracing import has_proxy, is_traced, not_compiled
