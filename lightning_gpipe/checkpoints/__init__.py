"""Checkpoints that load in a plain Trainer, under any balance, in any number of processes.

Files are written atomically. All that a pipeline adds is one entry, which a plain Trainer ignores.
"""

from lightning_gpipe.checkpoints.atomic_file import AtomicFiles, check_contents
from lightning_gpipe.checkpoints.entry import (
    States,
    generators_of,
    saved_states,
    set_states,
    states_of,
    value_of_entry,
    with_entry,
    with_states,
)
from lightning_gpipe.checkpoints.portable import (
    drop_foreign_states,
    follow_parameters,
    load_into_stages,
    load_optimizer_state,
    load_state,
    on_cpu,
    state_follows,
    to_cpu,
)
from lightning_gpipe.checkpoints.sharded import (
    folder_of,
    load_model,
    load_optimizer,
    load_rest,
    make_room,
    optimizer_part,
    rest_of,
    save_parts,
    set_aside,
)
