"""What the layers of a model cost, and what they hold: measured or counted, one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lightning_gpipe.core.faithful import preserved
from lightning_gpipe.core.plan import ModelProfile, Partition, Program, lay_out
from lightning_gpipe.core.profile.holding import held_by
from lightning_gpipe.core.profile.optimizers import Optimizers, optimizer_bytes
from lightning_gpipe.core.profile.rounds import Rounds
from lightning_gpipe.core.run import Stage
from lightning_gpipe.core.skip import routes_of, skips_of


@dataclass(frozen=True)
class Subject:
    """What is profiled.

    Attributes:
        root: The user's model.
        layers: A partition for each layer.
        names: What to call each of them.
        beside: What is profiled of the model besides, and so is not around these layers.
        program: What they run, if that is not one after another.
        microbatches: A micro-batch by its number of rows: the largest of the mini-batch and, to
            tell the costs of rows from others, a smaller one.
        chunks: The number of micro-batches of the mini-batch.
    """

    root: nn.Module
    layers: Sequence[Partition]
    names: Sequence[str]
    beside: Sequence[nn.Module]
    program: Program | None
    microbatches: Mapping[int, Any]
    chunks: int


def profile_layers(
    subject: Subject, device: torch.device, optimizer: Optimizers = None, *, split: bool = False
) -> ModelProfile:
    """Measure what each layer costs.

    The layers run in their training mode, in the caller's autocast. Parameters, gradients, buffers,
    attributes of layers and random generators are the same afterwards.

    Args:
        subject: What is profiled.
        device: Where the layers run; on the meta device operations are counted and nothing is
            computed.
        optimizer: As for :func:`~.optimizers.optimizer_bytes`.
        split: Whether to measure backwards in two parts, too.

    Raises:
        TypeError, ValueError: If the optimizer is none.
        BaseException: What a layer raises, with a note of where.
    """
    stages = _stages(subject.layers, device)
    modules = [module for stage in stages for module in stage.modules]
    kept = optimizer_bytes(subject.root.parameters(), optimizer)
    (empty,) = _stages([Partition(0, 0, (nn.Identity(),))], device)
    measured = Rounds(subject.program, subject.microbatches, stages, empty, device, split=split)
    with preserved(modules, [device]), torch.enable_grad():
        measured.run()
    held = held_by(
        subject.root,
        [each.layers for each in subject.layers],
        subject.names,
        subject.beside,
        kept,
    )
    return ModelProfile(
        tuple(
            replace(held[stage.partition.index], **costs)
            for stage, costs in zip(stages, measured.costs(subject.chunks), strict=True)
        ),
        measured.carried,
        held[-1],
        max(subject.microbatches),
        subject.chunks,
        measured.meter.unit,
        str(device),
        measured.output,
    )


def _stages(partitions: Sequence[Partition], device: torch.device) -> list[Stage]:
    """A stage for each layer, which follows parameters that are on another device."""
    layers = [layer for partition in partitions for layer in partition.layers]
    routes = routes_of(skips_of(layers, partitions), partitions)
    layout = lay_out(partitions, [device], routes)
    found = {parameter: parameter.device for parameter in layout.homes}
    layout = layout.with_homes(found)
    return [Stage(layout, j, deferred_batch_norm=True) for j in range(layout.n)]
