"""The inputs of pipelines in a call of the user's model, before there is a pipeline.

The model stops when it has come to its last pipeline: later code costs time and memory. Parameters,
buffers, attributes and random generators are the same afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_gpipe.core.data import MicroBatching, Rows, change_tensors
from lightning_gpipe.core.faithful import (
    Manager,
    add_note,
    parameters_preserved,
    preserved,
    rows_needed,
    together,
)
from lightning_gpipe.core.layout import Partition
from lightning_gpipe.core.pipeline.piped_module import PipedModule
from lightning_gpipe.core.pipeline.pipeline import as_batch
from lightning_gpipe.core.profile import Subject
from lightning_gpipe.core.programs import Program


class Entry(NamedTuple):
    """The inputs of a pipeline: a partition and a stage of the program for each unit."""

    layers: Sequence[Partition]
    program: Program
    values: Sequence[Any]


class _AllReached(BaseException):
    """Ends a call that has come to its last pipeline."""


def unchanged(root: nn.Module) -> Manager:
    """Restore at the end of a ``with`` block what calls of the model or its methods have changed.

    These are parameters, buffers, attributes and random generators.
    """
    devices = {parameter.device for parameter in root.parameters()}
    modules = list(root.modules())
    return together([preserved(modules, devices), parameters_preserved(modules)])


def entries_of(
    modules: Sequence[PipedModule],
    call: Callable[..., Any],
    arguments: Callable[[], Sequence[Any]] = tuple,
) -> list[Entry]:
    """Return the inputs of each pipeline in a call of the model, which must reach all.

    What making its ``arguments`` changes is restored, too.
    """
    layers = {piped: _unit_partitions(piped) for piped in modules}
    entries: dict[PipedModule, Entry] = {}

    def record(piped: PipedModule, program: Program, values: Sequence[Any], **_: Any) -> list[Any]:
        own = change_tensors(values, lambda x: x.detach().requires_grad_(x.requires_grad))
        entries.setdefault(piped, Entry(layers[piped], program, own))
        if len(entries) == len(modules):
            raise _AllReached
        by_number = dict(zip(program.inputs, values, strict=True))
        for part in program.parts:
            by_number |= part.call(by_number)
        return [by_number[number] for number in program.outputs]

    with unchanged(modules[0].root), torch.enable_grad(), ExitStack() as stack:
        args = arguments()
        for piped in modules:
            stack.enter_context(piped.watched(partial(record, piped)))
        try:
            call(*args)
        except _AllReached:
            return [entries[piped] for piped in modules]
    missing = ", ".join(piped.name for piped in modules if piped not in entries)
    raise RuntimeError(
        "a call with the sample must reach what is balanced, so that its input is known: "
        f"{missing} was not called. Pass a sample with which the model calls it, or a balance as "
        "a list."
    )


def calling(root: nn.Module, sample: Any) -> Callable[[], Any]:
    """Return a function that calls a model with a tuple or dict of arguments, or with one."""
    device = next((parameter.device for parameter in root.parameters()), None)
    if device is not None:
        sample = change_tensors(sample, lambda x: x.to(device))
    named = sample if isinstance(sample, dict) else {}
    args = sample if isinstance(sample, tuple) else () if named else (sample,)
    return lambda: root.forward(*args, **named)  # what is installed by then


def entries_with(modules: Sequence[PipedModule], sample: Any) -> list[Entry]:
    """Return the inputs of each pipeline if the model is called with a sample."""
    if sample is None:
        raise ValueError(
            "a balance by time or memory measures the layers on a mini-batch: got sample=None. "
            "Write sample=x, with x as the model is called with, or balance='parameters'."
        )
    (first, *others) = modules
    if first.frontend.takes_batch and not (first.path or others):
        return entries_of(modules, lambda: first.run(sample))
    return entries_of(modules, calling(first.root, sample))


def subject_of(
    piped: PipedModule,
    entry: Entry,
    numbers: Sequence[int],
    microbatching: MicroBatching | None,
    beside: Sequence[nn.Module] = (),
    *,
    by_rows: bool = True,
) -> Subject:
    """Return micro-batches to profile: for each number of them the first one.

    With ``by_rows``, there is one more, of about half of the rows of the last.
    """
    microbatching = microbatching or Rows(at_least=rows_needed(piped.module))
    divided = [microbatching.split(as_batch(entry.values), number) for number in numbers]
    microbatches: dict[int, Any] = {}
    chunks: dict[int, int] = {}
    for pieces in divided:
        rows = _rows_in(pieces[0], microbatching) or 1  # of all, if it is not known
        microbatches.setdefault(rows, pieces[0])
        chunks.setdefault(rows, len(pieces))
    half = microbatching.split(divided[-1][0], 2)[-1] if by_rows else None
    if half is not None and (rows_of_half := _rows_in(half, microbatching)):
        microbatches.setdefault(rows_of_half, half)
    layers, units = entry.layers, piped.frontend.units
    return Subject(piped.root, layers, units, beside, entry.program, microbatches, chunks)


def _rows_in(microbatch: Any, microbatching: MicroBatching) -> int | None:
    division = microbatching.division([microbatch])
    return None if division is None else division.sizes[0]


def _unit_partitions(piped: PipedModule) -> list[Partition]:
    try:
        return piped.frontend.partitions([1] * len(piped.frontend.units))
    except (TypeError, ValueError) as error:
        add_note(
            error,
            "raised where each unit was made a stage of its own, to be measured. A balance as a "
            "list, or balance='parameters', may keep together what cannot be apart.",
        )
        raise
