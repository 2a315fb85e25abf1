"""What is taken out of the engine: data, which ``python -m tests.mutation --declaration`` prints.

A statement whose value nobody takes is there for its effect, so each is a mutant, whatever it is
called: new code is covered without a line here. The names only tell the kind of an effect, and
which calls make context managers.
"""

from __future__ import annotations

import re

# The rooms whose modules are mutated by default.
ROOMS = (
    "lightning_gpipe/core/transport",
    "lightning_gpipe/core/run",
    "lightning_gpipe/core/faithful",
)

# The kind of an effect, by the first word of the name of what is called or assigned.
KINDS = {
    "waits": "finish fetch join rejoin synchronize wait",
    "sends": "cancel notify put send start wake",
    "records": "add append find forget insert lend mark note record save settle share update watch "
    "watched warn",
    "sets": "assign begin set setattr swap",
    "rewinds": "advance manual_seed replay reset restore rewind seed",
    "undoes": "abandon clear close commit delete exit pop release remove undo",
    "checks": "check explain raise refuse",
}

# The first word of a call that makes a context manager: taken out of a ``with`` statement, and out
# of a list, a tuple or a sum that collects managers.
MANAGERS = (
    "changed drawing dropping entered exclusive replaying saving swapped training undone using"
)

# Methods of a container. On a local variable they compute a value, and are no effect.
BUILDING = "add append extend insert setdefault sort update"

# The promises that a module is there for, among all that reach it: ``test_<name>.py`` in
# ``tests/promises``. Their tests are tried early; no result depends on it.
PROMISES = {
    "transport/exclusion.py": "concurrency nested_pipelines forks interrupts",
    "transport/local.py": "concurrency faults random_faults interrupts forks",
    "run/guards/lost_gradients.py": "loss_terms kept_tensors leaks concurrency parameters_in_steps",
    "run/autograd_node.py": "autograd layouts_of_tensors several_forwards",
    "run/backward/stage_backward.py": "captured_tensors",
    "run/guards/forbidden_edits.py": "hooks_of_layers batch_edits parameters_edited_in_forward",
    "faithful/random/reproducible.py": "draws_in_backward reproducibility untagged_operators",
    "run/engine.py": "loss_terms leaks concurrency side_channels",
    "run/backward/sums.py": "captured_tensors tied_weights",
    "faithful/random/library_watch.py": "library_draws",
    "run/minibatch.py": "interrupts leaks loss_terms concurrency library_draws captured_tensors "
    "draws_in_backward thread_local_state batch_dimension faults_elsewhere faults batch_edits",
    "run/minibatch_run.py": "leaks loss_terms captured_tensors batch_edits",
    "run/guards/shared_objects.py": "side_channels",
    "run/guards/values_on_layers.py": "parameters_in_steps",
    "run/micro_batch_losses/caller_task.py": "steps_that_fail steps_by_micro_batch chains",
    "run/micro_batch_losses/coroutine.py": "steps_that_fail",
    "run/micro_batch_losses/losses.py": "steps_by_micro_batch steps_that_fail",
    "run/micro_batch_losses/outside_gradients.py": "parameters_in_steps",
    "run/micro_batch_losses/step_minibatch.py": "steps_by_micro_batch steps_that_fail "
    "parameters_in_steps memory_of_steps context_variables_in_steps leaks processes_that_draw "
    "steps_over_processes",
    "run/micro_batch_losses/user_step.py": "steps_that_fail steps_by_micro_batch "
    "parameters_in_steps memory_of_steps steps_over_processes chains",
    "run/stage.py": "state_of_layers interrupts partial_training",
    "run/stage_pass.py": "parameters_edited_in_forward batch_edits tools loss_terms skips leaks "
    "state_of_layers side_channels batch_dimension running_statistics hooks",
    "run/worker.py": "skips faults thread_local_state",
    "faithful/state/attributes.py": "state_of_layers",
    "faithful/layers/batchnorm.py": "running_statistics interrupts",
    "faithful/state/behavior.py": "state_of_layers parameters_edited_in_forward sparse_buffers",
    "faithful/state/buffers.py": "state_of_layers parameters_edited_in_forward sparse_buffers",
    "faithful/state/contents.py": "state_of_layers",
    "faithful/thread/context.py": "thread_local_state tools leaks",
    "faithful/state/inplace.py": "transparency batch_edits",
    "faithful/journal.py": "interrupts forks faults_elsewhere",
    "faithful/random/random_state.py": "library_draws reproducibility state_of_layers",
    "faithful/thread/modes.py": "tools interrupts thread_local_state",
    "faithful/notes.py": "faults faults_elsewhere",
    "faithful/state/parameters.py": "parameters_edited_in_forward",
    "faithful/random/generators.py": "reproducibility draws_in_backward",
    "faithful/random/private_generators.py": "reproducibility untagged_operators draws_in_backward",
    "faithful/layers/batch_dimension.py": "batch_dimension",
    "faithful/parameter_leaves.py": "quantised_layers tied_weights parameters",
    "faithful/parameter_slots.py": "parameters_in_steps",
    "faithful/shadow.py": "parameters interrupts tied_weights",
    "faithful/state/stage_state.py": "state_of_layers parameters_edited_in_forward",
}

# An effect on CUDA streams: only tests for GPUs can notice that it is missing.
STREAMS = re.compile(r"stream|event|cuda|lend\(|rejoin")


def kind_of(name: str) -> str:
    """The kind of an effect, by the name of what is called or assigned; "acts" if it has none."""
    word = first_word(name)
    return next((kind for kind, words in KINDS.items() if word in words.split()), "acts")


def makes_manager(name: str) -> bool:
    """Whether a function of this name makes a context manager."""
    return first_word(name) in MANAGERS.split()


def first_word(name: str) -> str:
    """The first word of an identifier: ``wait`` of ``_wait_for_all``."""
    return name.strip("_").partition("_")[0]
