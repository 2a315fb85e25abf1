"""A pipeline whose layers run one after another, as what a verification compares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from lightning_gpipe.core.data import MicroBatching
from lightning_gpipe.core.faithful import Journal
from lightning_gpipe.core.frontends import StandIn
from lightning_gpipe.core.pipeline import Layers
from lightning_gpipe.core.run import Engine, Stage, Timeline


class Layered(StandIn):
    """What a verification needs of an nn.Sequential that runs as a pipeline.

    Its children are the layers.

    Args:
        taken: The nn.Sequential.
    """

    def __init__(self, taken: Layers) -> None:
        super().__init__(taken.module)
        self._taken = taken

    @property
    def engine(self) -> Engine:
        """The engine."""
        return self._taken.pipeline.engine

    def unchanged(self) -> AbstractContextManager[None]:
        """Keep no record of what runs in a ``with`` block."""
        return self.engine.unchanged()

    @property
    def patches(self) -> Journal:
        """The changes that the verification makes."""
        return self._taken.pipeline.patches

    @property
    def stages(self) -> Sequence[Stage]:
        """The stages, in order."""
        return self._taken.pipeline.stages

    @property
    def devices(self) -> list[torch.device]:
        """The device of each worker."""
        return list(self._taken.pipeline.layout.devices)

    @property
    def timeline(self) -> Timeline | None:
        """What ran when in the latest mini-batch."""
        return self.engine.timeline

    @property
    def microbatching(self) -> MicroBatching:
        """How the input is cut."""
        return self._taken.pipeline.microbatching

    def run(self, input: Any) -> Any:
        """Run the layers in micro-batches."""
        return self._taken.run_layers(input)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(layer for stage in self.stages for layer in stage.partition.layers)
