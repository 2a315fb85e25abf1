"""Peers: defects of other pipelines, and the tests that show their absence.

They are those of torchgpipe 0.0.7, and of torch.distributed.pipelining in torch 2.13 if they apply
to one process.
"""

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]

TORCHGPIPE = {
    "paired up the pieces of tensors, so rows without a partner were lost": (
        "core/pipeline/test_gpipe.py::test_batch_whose_tensors_disagree"
    ),
    "ran stages without the caller's autocast, which is of a thread": (
        "promises/test_thread_local_state.py::test_layers_see_the_callers_state"
    ),
    "ran stages without the caller's inference mode, which is of a thread": (
        "promises/test_thread_local_state.py::test_layers_see_that_nothing_is_recorded"
    ),
    "ran stages without hooks on saved tensors, so offloading had no effect": (
        "promises/test_tools.py::test_offloading_to_the_cpu"
    ),
    "ran stages outside of a FLOP counter, which counted none": (
        "promises/test_tools.py::test_flops_of_a_step"
    ),
    "waited for `chunks` micro-batches, so statistics slipped to later steps": (
        "promises/test_running_statistics.py::test_running_statistics_with_fewer_micro_batches"
    ),
    "summed x and x² up, so the variance was biased and lost its digits": (
        "promises/test_running_statistics.py::test_running_variance_of_few_large_values"
    ),
    "added the sums of its batch norms to the state dict": (
        "promises/test_state_dict.py::test_state_dict_with_batch_norms"
    ),
    "took any output to carry the graph, so integers failed in backward": (
        "promises/test_transparency.py::test_outputs_of_every_kind"
    ),
    "named parameters by partition, so only an equal balance could load them": (
        "promises/test_state_dict.py::test_state_dict_of_another_balance"
    ),
    "gave a gradient per micro-batch, which DistributedDataParallel refuses": (
        "promises/test_autograd.py::test_distributed_data_parallel_around"
    ),
    "caught Exception only, so KeyboardInterrupt in a layer hung the caller": (
        "promises/test_faults.py::test_error_in_a_layer"
    ),
    "recomputed a frozen stage, in which nothing needs a gradient": (
        "promises/test_partial_training.py::test_frozen_first_layers_run_forward_once"
    ),
    "cut by a heuristic: two of three balances could be bettered, by up to 1.62 times": (
        "core/balance/test_solver.py::test_random_integers_against_brute_force"
    ),
    'raised "pop from an empty deque" in a second backward': (
        "promises/test_autograd.py::test_second_backward_is_refused"
    ),
    "failed under autograd.grad(), as its checkpointing knew backward() only": (
        "promises/test_autograd.py::test_gradients_without_accumulation"
    ),
    'took stash="skip" for the names "s", "k", "i" and "p"': (
        "core/skip/test_misuse.py::test_string_in_the_place_of_a_list"
    ),
    "did not see skippable modules that are nested in other layers": (
        "core/skip/test_skip_layout.py::test_modules_nested_in_layers_count_as_the_layer"
    ),
}
TORCH_PIPELINING = {
    "ran layers on memory never written to, to learn shapes: running means of 4e14": (
        "promises/test_running_statistics.py::test_statistics_of_the_first_step"
    ),
    "returned 8 rows for 7 in 4 micro-batches, and failed in backward": (
        "promises/test_dynamic_graphs.py::test_batches_and_sequences_of_every_size"
    ),
    "returned rows of the batch before, where that had more": (
        "promises/test_dynamic_graphs.py::test_smaller_batch_after_a_larger_one"
    ),
    "raised different errors on two ranks for fewer rows than chunks": (
        "promises/test_dynamic_graphs.py::test_fewer_rows_than_chunks"
    ),
    "raised that a dict between stages has no size": (
        "promises/test_structures.py::test_dicts_whose_keys_change"
    ),
    "made a RuntimeError of a layer's error, for whose end the other rank waited": (
        "promises/test_faults.py::test_error_in_a_layer"
    ),
}


def functions_of(file: str) -> set[str]:
    """The names of the functions in a file, with the file's."""
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return {f"{file}::{each.name}" for each in tree.body if isinstance(each, ast.FunctionDef)}


def test_pointers_lead_to_tests() -> None:
    pointers = {*TORCHGPIPE.values(), *TORCH_PIPELINING.values()}
    files = {pointer.split("::")[0] for pointer in pointers}

    assert pointers <= set().union(*map(functions_of, files))
