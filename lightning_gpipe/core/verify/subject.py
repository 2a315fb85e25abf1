"""The subject of a verification: a pipeline, a program, and the units in which runs are compared.

The layers of an nn.Sequential have one input and one output each, so they are compared one by one,
and the steps of any other program stage by stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_gpipe.core.data import named_leaves, requires_grad
from lightning_gpipe.core.faithful import Changes
from lightning_gpipe.core.layout import Layout, layers_of, stages_of_layers
from lightning_gpipe.core.pipeline import Pipeline
from lightning_gpipe.core.profile import Visit, walk_program
from lightning_gpipe.core.programs import Program, chain
from lightning_gpipe.core.verify.named_values import Values, kept_values, unpacked


class VerifiedUnit(NamedTuple):
    """A layer of an nn.Sequential, or a stage of another program; maybe of another process."""

    name: str
    title: str
    module: nn.Module
    stage: int


class VerifiedProgram:
    """A pipeline and a program of it, in units: layers of an nn.Sequential, or stages.

    If ``sampled``, only outputs that may have a gradient, and numbers, are compared, and less of
    gradients.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        program: Program,
        sequential: nn.Module | None = None,
        *,
        sampled: bool = False,
    ) -> None:
        layout = pipeline.layout
        self.pipeline, self.sampled = pipeline, sampled
        self.devices = layout.devices_here
        self._program = program
        if sequential is not None:
            self.kind, self.module = "layer", sequential
            self.units = list(_layers(sequential, layout, program.stages))
            self._by_unit = chain([(unit.module, unit.title)] for unit in self.units)
        else:
            self.kind, self.module = "stage", nn.Module()
            self.module.training = any(layer.training for layer in layout.layers)
            self.units = [_stage(layout, j) for j in range(layout.n)]
            self.module._modules.update({unit.name: unit.module for unit in self.units})
            self._by_unit = program

    def run(self, input: Any) -> Any:
        values, stacked = self._values(input), self.kind == "layer"
        return unpacked(self.pipeline.run_program(self._program, values, stacked=stacked))

    def named(self, output: Any) -> list[tuple[str, Any]]:
        """Return the leaves of an output that are compared, and their paths."""
        leaves = named_leaves(output)
        if not self.sampled:
            return leaves
        return [(path, x) for path, x in leaves if requires_grad(x) or isinstance(x, int | float)]

    def kept(self) -> Callable[[], Values]:
        """Return a function that returns what the layers have left in attributes since."""
        changes = Changes(self.module.modules())
        return partial(kept_values, changes, [*self.module.named_modules()])

    def walk(self, input: Any, visit: Visit) -> Any:
        stages = [self.pipeline.stages[unit.stage] for unit in self.units]
        return unpacked(walk_program(stages, self._by_unit, self._values(input), visit))

    def device_of(self, k: int) -> torch.device:
        return self.pipeline.layout.device_of(self.units[k].stage)

    def owner_of(self, name: str) -> int:
        return next(k for k, unit in enumerate(self.units) if name.startswith(f"{unit.name}."))

    def _values(self, input: Any) -> list[Any]:
        return [input] if len(self._program.inputs) == 1 else input


def _layers(sequential: nn.Module, layout: Layout, own: range) -> Iterator[VerifiedUnit]:
    assert isinstance(sequential, nn.Sequential)
    stages = stages_of_layers(layout.partitions[j] for j in own)
    for k, (name, layer) in enumerate(layers_of(sequential).items()):
        j = stages[k]
        kind, where = type(layer).__name__, f"stage {j}, {layout.where(j)}"
        yield VerifiedUnit(name, f"layer {k} ({name!r}, {kind}, {where})", layer, j)


def _stage(layout: Layout, j: int) -> VerifiedUnit:
    part = layout.partitions[j]
    module = nn.Module()
    names = part.names or map(str, part.indices)
    module._modules.update(zip(names, part.layers, strict=True))  # names may have dots
    return VerifiedUnit(f"stage {j}", f"stage {j} ({part}, {layout.where(j)})", module, j)
