"""Runs the program of a recording, and turns the placeholders still in use into tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_gpipe.core.data import whole
from lightning_gpipe.core.faithful import record, without_checkpointing
from lightning_gpipe.core.frontends.frontend import RunProgram
from lightning_gpipe.core.frontends.module_list.blocks import running
from lightning_gpipe.core.frontends.module_list.recording import LoopRecording
from lightning_gpipe.core.frontends.module_list.tape.arguments import WHOLE
from lightning_gpipe.core.frontends.module_list.tape.calls import TensorLeaf
from lightning_gpipe.core.frontends.module_list.tape.placeholder import Placeholder, become
from lightning_gpipe.core.programs import Program, Step, Value

_NOT_RUN = (
    "The pipeline of these blocks has not run yet: with a loss for each micro-batch, a module has "
    "what the forward left there for the latest one. Let the forward return what the loss needs, "
    "or write schedule='fill_drain'."
)
_PROGRAMS = 8  # in memory of a tape: one for each choice of values that the forward keeps


def run_recorded(recording: LoopRecording, run: RunProgram, stages: range, n: int) -> None:
    """Run the program of a recording; its placeholders that are in use get values.

    Its ``stages`` are among those of a pipeline of ``n``.
    """
    wanted = {placeholder.number: placeholder for placeholder in recording.alive}
    program = _program(recording, wanted, stages, n)
    inputs = (recording.inputs[number] for number in program.inputs)
    arguments = [tensor if reading else whole(tensor) for tensor, reading in inputs]
    recording.remember()  # even if the outputs are for another process, and the code ends here
    recording.end_reason = _NOT_RUN
    # A checkpoint around the last block would run it again in backward, outside of its pipeline.
    with without_checkpointing(), running():
        values = run(program, arguments, chunks=1 if recording.samples.single else None)
    names = {number: recording.tape.steps[number].name for number in wanted}
    rows, single = recording.rows, recording.samples.single
    recording.end("The pipeline of these blocks has run, without this value.")
    for (number, placeholder), value in zip(wanted.items(), values, strict=True):
        merged = value if single else _restore(value, placeholder.leaf, rows, names[number])
        become(placeholder, merged.view_as(merged))  # autograd may have saved the tensor itself


def _program(
    recording: LoopRecording, wanted: Mapping[int, Placeholder], stages: range, n: int
) -> Program:
    tape, single = recording.tape, recording.samples.single
    key = single, tuple(wanted)
    if key not in tape.programs:
        steps = list(tape.steps.values())
        outputs: list[int] = []
        for number, placeholder in wanted.items():
            merging = None if single else _merging(placeholder.leaf)
            if merging is not None:
                run, *more = merging
                output, step = tape.count + len(outputs), tape.steps[number]
                args = (Value(number), *more)
                steps.append(Step(run, args, output, step.stage, {}, step.name, step.line))
                number = output
            outputs.append(number)
        inputs = list(recording.inputs)
        program = Program(steps, inputs=inputs, outputs=outputs, n=n, stages=stages)
        record(tape.programs, key, program, _PROGRAMS)
    return tape.programs[key]


def _merging(leaf: TensorLeaf) -> tuple[Any, ...] | None:
    """Return a function that makes a value mergeable, and its further arguments; None if it is.

    Several entries per row become one; a value without rows is marked.
    """
    if leaf.reading is None or (leaf.reading == 1 and leaf.dim == 0):
        return None
    if leaf.dims == 0:
        return torch.unsqueeze, 0
    return (whole,) if leaf.reading == WHOLE else (_with_rows_first, leaf)


def _with_rows_first(value: Tensor, leaf: TensorLeaf) -> Tensor:
    sizes = (leaf.reading, -1) if leaf.inner else (-1, leaf.reading)
    return value.unflatten(leaf.dim, sizes).movedim(leaf.dim + leaf.inner, 0)


def _restore(value: Tensor, leaf: TensorLeaf, rows: int, name: str) -> Tensor:
    """Return the tensor that a placeholder stands for, made of the merged value."""
    if leaf.dims == 0:
        if value.numel() != 1:
            raise RuntimeError(
                "what a block returns must have a row for each row of its input, if it is used "
                f"after the last block: got a 0-dim tensor of {name}, another one for each "
                "micro-batch. Return a tensor with rows, or hand it out with "
                "lightning_gpipe.loss_term."
            )
        return value.squeeze(0)
    if leaf.reading == WHOLE:
        return value
    if value.size(0) != rows:
        raise RuntimeError(
            "what a block returns must have the rows of its input in dim 0, if it is used after "
            f"the last block: got {value.size(0)} rows of {name} for {rows}."
        )
    if leaf.reading == 1 and leaf.dim == 0:
        return value
    return value.movedim(0, leaf.dim + leaf.inner).flatten(leaf.dim, leaf.dim + 1)
