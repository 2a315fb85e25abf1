"""A pipeline that runs a program, as what a verification compares: a layer for each stage.

The plain run of a program are its steps on the whole mini-batch, one after another. Steps have no
one input and output, so differences are located by stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from lightning_gpipe.core.data import MicroBatching
from lightning_gpipe.core.faithful import Journal
from lightning_gpipe.core.pipeline import Pipeline
from lightning_gpipe.core.plan import Program
from lightning_gpipe.core.profile import walk_program
from lightning_gpipe.core.run import Engine, Stage, Timeline

Visit = Callable[[int, Callable[[Any], Any], Any], Any]


class Programmed(nn.Module):
    """What a verification needs of a pipeline that runs a program.

    Its children are the stages, whose children are the user's modules under their names.

    Args:
        pipeline: The pipeline.
        program: The program.
    """

    def __init__(self, pipeline: Pipeline, program: Program) -> None:
        super().__init__()
        self._pipeline = pipeline
        self._program = program
        for stage in pipeline.stages:
            held = nn.Module()
            partition = stage.partition
            names = partition.names or map(str, partition.indices)
            held._modules.update(zip(names, partition.layers, strict=True))  # names may have dots
            self._modules[f"stage {partition.index}"] = held

    @property
    def engine(self) -> Engine:
        """The engine."""
        return self._pipeline.engine

    def unchanged(self) -> AbstractContextManager[None]:
        """Keep no record of what runs in a ``with`` block."""
        return self.engine.unchanged()

    @property
    def patches(self) -> Journal:
        """The changes that the verification makes."""
        return self._pipeline.patches

    @property
    def stages(self) -> Sequence[Stage]:
        """The stages, in order."""
        return self._pipeline.stages

    @property
    def devices(self) -> list[torch.device]:
        """The device of each worker."""
        return list(self._pipeline.layout.devices)

    @property
    def timeline(self) -> Timeline | None:
        """What ran when in the latest mini-batch."""
        return self._pipeline.engine.timeline

    @property
    def microbatching(self) -> MicroBatching:
        """How values are cut."""
        return self._pipeline.microbatching

    def run(self, values: Sequence[Any]) -> list[Any]:
        """Run the program in micro-batches."""
        return self._pipeline.run_program(self._program, values)

    def walk(self, values: Sequence[Any], visit: Visit) -> list[Any]:
        """Run the parts of the program on the whole values, each by ``visit``."""
        return walk_program(self.stages, self._program, values, visit)

    def device_of(self) -> Mapping[int, torch.device]:
        """The device of each stage."""
        return {stage.partition.index: stage.device for stage in self.stages}

    def title(self, k: int) -> str:
        """What messages call a stage."""
        return str(self.stages[k])

    def __iter__(self) -> Iterator[nn.Module]:
        return self.children()
