"""Runs a program on a whole batch, part by part, each on its stage's device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from lightning_gpipe.core.data import change_tensors
from lightning_gpipe.core.faithful import Manager, Write
from lightning_gpipe.core.programs import Program
from lightning_gpipe.core.run import Stage
from lightning_gpipe.core.skip import Table, using_table

# Values of a program by their numbers, and what makes those of a part.
Numbered = Mapping[int, Any]
Visit = Callable[[int, Callable[[Numbered], Numbered], Numbered], Numbered]


def walk_program(
    stages: Sequence[Stage],
    program: Program,
    values: Sequence[Any],
    visit: Visit = lambda k, run, needed: run(needed),
) -> list[Any]:
    """Run the parts of a program in order, and return the values of its outputs.

    Args:
        stages: The stage of each part; one stage may have several parts in a row.
        values: The values of the program's inputs, on any device.
        visit: Runs one part: called with its index, the function that runs it, and the values that
            it needs by number, on the device of its stage; returns the values that it makes.
    """
    skips: Table = {}
    by_number = dict(zip(program.inputs, values, strict=True))
    sources: dict[int, torch.device] = {}  # of the values that parts have made
    for k, (stage, part) in enumerate(zip(stages, program.parts, strict=True)):
        numbers = {number for step in part.steps for number in step.needs} & by_number.keys()
        needed = {n: _moved(by_number[n], sources.get(n), stage.device) for n in numbers}
        for route in stage.arriving:
            if route.name in skips:  # else an earlier part of the stage has popped it
                skips[route.name] = _moved(skips[route.name], None, stage.device)
        with following(stage), current(stage.device), using_table(skips):
            made = visit(k, part.call, needed)
        by_number |= made
        sources |= dict.fromkeys(made, stage.device)
    return [_moved(by_number[n], sources.get(n), stages[-1].device) for n in program.outputs]


def following(stage: Stage) -> Manager:
    """Use copies of the parameters whose home is another device, for a ``with`` block."""
    writes: list[Write] = []
    for module, name in stage.followed:
        parameter = module._parameters[name]
        assert parameter is not None, "a followed slot has a parameter"
        # Not a Parameter, but a tensor in the parameter's graph.
        writes.append((module._parameters, name, parameter.to(stage.device)))
    return stage.journal.changed(writes)


def _moved(x: Any, source: torch.device | None, target: torch.device) -> Any:
    """Move tensors as between stages: one that a layer put on yet another device stays there."""
    return change_tensors(
        x, lambda leaf: leaf.to(target) if source in (None, leaf.device) else leaf
    )


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Make a CUDA device the current one in a ``with`` block."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
