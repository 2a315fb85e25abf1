"""One stage on the CPU, and passes through it."""

from typing import Any

import torch
from torch import nn

from lightning_gpipe.core.layout import Layout, balance_of_layers, cut, lay_out
from lightning_gpipe.core.programs import Program, chain
from lightning_gpipe.core.run import Stage, StagePass, pass_alone

CPU = torch.device("cpu")


class Pair(nn.Sequential):
    """Two modules that are one layer, since it has a forward of its own."""

    def forward(self, input: Any) -> Any:
        return super().forward(input)


def stage(*layers: nn.Module) -> Stage:
    """A stage of all these layers."""
    module = nn.Sequential(*layers)
    layout = lay_out(cut(module, balance_of_layers(module, [len(layers)])), [CPU])
    return Stage(layout, 0, deferred_batch_norm=True)


def program_of(layout: Layout) -> Program:
    """The program of layers that run one after another."""
    return chain(zip(each.layers, each.titles, strict=True) for each in layout.partitions)


NONE: frozenset[int] = frozenset()
ALL = frozenset(range(8))


def begin(stage: Stage, recomputed: frozenset[int] = NONE) -> StagePass:
    """A new mini-batch's pass through the stage."""
    partition = stage.partition
    layers = zip(partition.layers, partition.titles, strict=True)
    before = [[(nn.Identity(), "a stage before")]] * partition.index
    program = chain([*before, layers])
    return pass_alone(stage, program, recomputed=recomputed)
