"""What enters a pipeline when the user's model is called, before there is one.

The model is called as it is, and stops where it has come to its last pipeline: what comes after
costs time and memory, and may have effects. Buffers, attributes and random generators are the same
afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_gpipe.core.data import MicroBatching, Rows
from lightning_gpipe.core.faithful import add_note, preserved, rows_needed
from lightning_gpipe.core.pipeline.taken import Layers, Taken
from lightning_gpipe.core.plan import Partition, Program
from lightning_gpipe.core.profile import Subject, change_tensors


class Entry(NamedTuple):
    """What enters a pipeline.

    Attributes:
        layers: A partition for each unit.
        program: The program, with a stage for each; None if layers run one after another.
        input: The input of the layers, or the values of the program's inputs.
    """

    layers: Sequence[Partition]
    program: Program | None
    input: Any


class _AllSeen(BaseException):
    """Ends a call that has come to its last pipeline."""


def entries_of(found: Sequence[Taken], call: Callable[[], Any]) -> list[Entry]:
    """What enters each pipeline in a call of the model.

    Args:
        found: What will run as pipelines.
        call: Calls the model.

    Raises:
        RuntimeError: If the call has not come to all of them.
        BaseException: What the model raises.
    """
    layers = {taken: _each_alone(taken) for taken in found}
    entries: dict[Taken, Entry] = {}

    def seen(taken: Taken, program: Program | None, input: Any) -> Any:
        entries.setdefault(taken, Entry(layers[taken], program, change_tensors(input, _apart)))
        if len(entries) == len(found):
            raise _AllSeen
        if program is None:
            with taken.plain():
                return taken.module.forward(input)
        return _outputs(program, input)

    root = found[0].root
    devices = {parameter.device for parameter in root.parameters()}
    with preserved(root.modules(), devices), torch.enable_grad(), ExitStack() as stack:
        for taken in found:
            stack.enter_context(taken.watched(partial(seen, taken)))
        try:
            call()
        except _AllSeen:
            return [entries[taken] for taken in found]
    missing = ", ".join(taken.name for taken in found if taken not in entries)
    raise RuntimeError(
        "a call with the sample must reach what is balanced, so that its input is known: "
        f"{missing} was not called. Pass a sample with which the model calls it, or a balance as "
        "a list."
    )


def calling(root: nn.Module, sample: Any) -> Callable[[], Any]:
    """Calls a model with a sample: a tuple of arguments, a dict of named ones, or one argument."""
    device = next((parameter.device for parameter in root.parameters()), None)
    if device is not None:
        sample = change_tensors(sample, lambda x: x.to(device))
    named = sample if isinstance(sample, dict) else {}
    args = sample if isinstance(sample, tuple) else () if named else (sample,)
    return lambda: root.forward(*args, **named)  # what is installed by then


def entries_with(found: Sequence[Taken], sample: Any) -> list[Entry]:
    """What enters each pipeline if the model is called with a sample.

    An nn.Sequential that is the model takes it as it is, whatever it is.

    Raises:
        ValueError: If there is none.
    """
    if sample is None:
        raise ValueError(
            "a balance by time or memory measures the layers on a mini-batch: got sample=None. "
            "Write sample=x, with x as the model is called with, or balance='parameters'."
        )
    (first, *others) = found
    if isinstance(first, Layers) and not (first.path or others):
        return [Entry(_each_alone(first), None, change_tensors(sample, _apart))]
    return entries_of(found, calling(first.root, sample))


def subject_of(
    taken: Taken,
    entry: Entry,
    chunks: int,
    microbatching: MicroBatching | None,
    beside: Sequence[nn.Module] = (),
) -> Subject:
    """What is profiled: a micro-batch, and one of about half of its rows.

    Args:
        taken: Of which the layers are.
        entry: What enters it.
        chunks: The number of micro-batches.
        microbatching: How they are cut.
        beside: What else of the model is profiled.

    Raises:
        ValueError: If the input makes no micro-batches.
    """
    microbatching = microbatching or Rows(at_least=rows_needed(taken.module))
    pieces = microbatching.split(entry.input, chunks)
    found: dict[int, Any] = {}
    for piece in (pieces[0], microbatching.split(pieces[0], 2)[-1]):
        division = microbatching.division([piece])
        found.setdefault(1 if division is None else division.sizes[0], piece)
    if microbatching.division(pieces) is None:
        found = {1: pieces[0]}  # nobody knows its rows
    return Subject(taken.root, entry.layers, taken.units, beside, entry.program, found, len(pieces))


def _each_alone(taken: Taken) -> list[Partition]:
    """A partition for each unit.

    Raises:
        TypeError, ValueError: If what was taken cannot be cut everywhere.
    """
    try:
        return taken.each_alone()
    except (TypeError, ValueError) as error:
        add_note(
            error,
            "raised where each unit was made a stage of its own, to be measured. A balance as a "
            "list, or balance='parameters', may keep together what cannot be apart.",
        )
        raise


def _apart(x: torch.Tensor) -> torch.Tensor:
    """The tensor without the graph that made it."""
    return x.detach().requires_grad_(x.requires_grad)


def _outputs(program: Program, values: Sequence[Any]) -> list[Any]:
    """What a program makes, where its modules are."""
    known = dict(zip(program.inputs, values, strict=True))
    for part in program.parts:
        for step in part.steps:
            known[step.value] = step(known)
    return [known[number] for number in program.outputs]
