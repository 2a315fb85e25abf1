"""Runs the layers of a pipeline one by one on a whole batch, each on its stage's device.

There are no micro-batches, no workers and no recomputation: each layer takes what the previous one
returned. The caller gives a function that runs each layer, and can observe it or change its output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpipe.core.data import copy_marks, map_tensors
from lightning_gpipe.core.faithful import Manager, Write
from lightning_gpipe.core.plan import Part, Program
from lightning_gpipe.core.run import Stage
from lightning_gpipe.core.skip import Table, using_table

Visit = Callable[[int, nn.Module, Any], Any]
PartVisit = Callable[[int, Callable[[Any], Any], Any], Any]


def walk(stages: Iterable[Stage], x: Any, visit: Visit) -> Any:
    """Run the layers in order, and return what the last one returns.

    Args:
        stages: The stages whose layers to run.
        x: What the first layer takes, on any device.
        visit: Runs one layer, and returns what the next one takes: called with the index of the
            layer, the layer, and its input on the device of its stage.
    """
    skips: Table = {}
    source = None
    for stage in stages:
        x = _moved(x, source, stage.device)
        for route in stage.arriving:
            skips[route.name] = _moved(skips[route.name], None, stage.device)
        with following(stage), _current(stage.device), using_table(skips):
            for k, layer in enumerate(stage.partition.layers, start=stage.partition.first):
                x = visit(k, layer, x)
        source = stage.device
    return x


def walk_program(
    stages: Sequence[Stage], program: Program, values: Sequence[Any], visit: PartVisit
) -> list[Any]:
    """Run the parts of a program in order, and return the values of its outputs.

    Args:
        stages: The stages.
        program: The program.
        values: The values of its inputs, on any device.
        visit: Runs one part: called with the index of the stage, what runs the part, and its values
            by number, on the device of the stage; returns the values that the part makes.
    """
    skips: Table = {}
    known = dict(zip(program.inputs, values, strict=True))
    for j, (stage, part) in enumerate(zip(stages, program.parts, strict=True)):
        needed = {number for step in part.steps for number in step.needs} & known.keys()
        own = {number: _moved(known[number], None, stage.device) for number in needed}
        for route in stage.arriving:
            skips[route.name] = _moved(skips[route.name], None, stage.device)
        with following(stage), _current(stage.device), using_table(skips):
            known |= visit(j, partial(_made, part), own)
    return [_moved(known[number], None, stages[-1].device) for number in program.outputs]


def _made(part: Part, values: Mapping[int, Any]) -> dict[int, Any]:
    """What the steps of a part make of these values."""
    known = dict(values)
    for step in part.steps:
        known[step.value] = step(known)
    return {step.value: known[step.value] for step in part.steps}


def following(stage: Stage) -> Manager:
    """Use copies of the parameters whose home is another device, for a ``with`` block."""
    writes: list[Write] = []
    for module, name in stage.followed:
        parameter = module._parameters[name]
        assert parameter is not None, "a followed slot has a parameter"
        # Not a Parameter, but a tensor in the parameter's graph.
        writes.append((module._parameters, name, parameter.to(stage.device)))
    return stage.journal.changed(writes)


def change_tensors(tree: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Replace each tensor of the tree by ``function(tensor)``, with the same marks."""
    return map_tensors(lambda leaf: copy_marks(leaf, function(leaf)), tree)


def _moved(x: Any, source: torch.device | None, target: torch.device) -> Any:
    """Move tensors as between stages: one that a layer put on yet another device stays there."""
    return change_tensors(
        x, lambda leaf: leaf.to(target) if source in (None, leaf.device) else leaf
    )


def _current(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
