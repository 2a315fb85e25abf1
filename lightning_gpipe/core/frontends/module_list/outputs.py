"""Runs what was recorded, and turns the placeholders that are still wanted into tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_gpipe.core.data import whole
from lightning_gpipe.core.frontends.interface import RunProgram
from lightning_gpipe.core.frontends.module_list.arguments import WHOLE
from lightning_gpipe.core.frontends.module_list.blocks import running
from lightning_gpipe.core.frontends.module_list.placeholder import Placeholder, become
from lightning_gpipe.core.frontends.module_list.recording import Recording
from lightning_gpipe.core.frontends.module_list.results import TensorLeaf
from lightning_gpipe.core.frontends.module_list.thread_state import unchecked
from lightning_gpipe.core.plan import Program, Step, Value


def run_recorded(recording: Recording, run: RunProgram, n: int) -> None:
    """Run the program of a recording; its placeholders become the tensors that they stand for.

    Those that nothing refers to any more are not computed for the caller.

    Args:
        recording: What was recorded, the call of the last block included.
        run: Runs programs.
        n: The number of stages.

    Raises:
        RuntimeError: If a block returned something without rows that is wanted.
    """
    wanted = {each.number: each for each in recording.alive}
    program = _program(recording, wanted, n)
    inputs = (recording.inputs[number] for number in program.inputs)
    given = [tensor if reading else whole(tensor) for tensor, reading in inputs]
    with unchecked(), running():
        values = run(program, given, chunks=1 if recording.single else None)
    names = {number: recording.tape.steps[number].name for number in wanted}
    rows, single = recording.rows, recording.single
    recording.remember()
    recording.end("The pipeline of these blocks has run, without this value.")
    for (number, placeholder), value in zip(wanted.items(), values, strict=True):
        merged = value if single else _restored(value, placeholder.leaf, rows, names[number])
        become(placeholder, merged.view_as(merged))  # autograd may have saved the tensor itself


def _program(recording: Recording, wanted: Mapping[int, Placeholder], n: int) -> Program:
    """The program of a recording, which returns these values."""
    tape, single = recording.tape, recording.single
    key = single, tuple(wanted)
    if key not in tape.programs:
        steps = list(tape.steps.values())
        outputs: list[int] = []
        for number, placeholder in wanted.items():
            merging = None if single else _merging(placeholder.leaf)
            if merging is not None:
                run, *given = merging
                made, step = tape.count + len(outputs), tape.steps[number]
                args = (Value(number), *given)
                steps.append(Step(run, args, made, step.stage, {}, step.name, step.line))
                number = made
            outputs.append(number)
        inputs = list(recording.inputs)
        tape.keep(key, Program(steps, inputs=inputs, outputs=outputs, n=n))
    return tape.programs[key]


def _merging(leaf: TensorLeaf) -> tuple[Any, ...] | None:
    """What to call on a value, with further arguments, such that it can be merged; None if it can.

    What has several entries per row gets one for each row, and what has no rows is marked.
    """
    if leaf.reading in (None, 1):
        return None
    if leaf.dims == 0:
        return torch.unsqueeze, 0
    return (whole,) if leaf.reading == WHOLE else (torch.unflatten, 0, (-1, leaf.reading))


def _restored(value: Tensor, leaf: TensorLeaf, rows: int, name: str) -> Tensor:
    """The tensor that a placeholder stands for, of what was merged."""
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
    return value if leaf.reading == 1 else value.flatten(0, 1)
