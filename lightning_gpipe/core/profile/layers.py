"""Profiles the layers of a model one by one: their time, operations and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lightning_gpipe.core.balance import ModelProfile
from lightning_gpipe.core.faithful import preserved
from lightning_gpipe.core.layout import Partition, lay_out
from lightning_gpipe.core.profile.optimizers import Optimizers, optimizer_bytes
from lightning_gpipe.core.profile.rounds import Rounds
from lightning_gpipe.core.profile.sizes import static_costs
from lightning_gpipe.core.programs import Program
from lightning_gpipe.core.run import Stage
from lightning_gpipe.core.skip import routes_of, skips_of


@dataclass(frozen=True)
class Subject:
    """The layers to profile, and their inputs.

    Attributes:
        root: The user's model.
        layers: A partition for each layer.
        names: The name of each layer.
        beside: Other piped modules of the model, which are not around these layers.
        program: The program of the layers.
        microbatches: Micro-batches by their number of rows: the largest of the mini-batch and, to
            tell the costs per row from fixed ones, a smaller one.
        chunks: The number of micro-batches of the mini-batch.
    """

    root: nn.Module
    layers: Sequence[Partition]
    names: Sequence[str]
    beside: Sequence[nn.Module]
    program: Program
    microbatches: Mapping[int, Any]
    chunks: int


def profile_layers(
    subject: Subject, device: torch.device, optimizer: Optimizers = None, *, split: bool = False
) -> ModelProfile:
    """Measure what each layer costs.

    The layers run in their training mode, in the caller's autocast. Parameters, gradients, buffers,
    attributes of layers and random generators are the same afterwards.

    Raises:
        TypeError, ValueError: If the optimizer is not one.
        BaseException: The error of a layer, with a note that names it.
    """
    stages = _stages(subject.layers, device)
    modules = [module for stage in stages for module in stage.modules]
    state_bytes = optimizer_bytes(subject.root.parameters(), optimizer)
    (empty,) = _stages([Partition(0, 0, (nn.Identity(),))], device)
    rounds = Rounds(subject.program, subject.microbatches, stages, empty, device, split=split)
    with preserved(modules, [device]), torch.enable_grad():
        rounds.run()
    static = static_costs(
        subject.root,
        [partition.layers for partition in subject.layers],
        subject.names,
        subject.beside,
        state_bytes,
    )
    return ModelProfile(
        tuple(
            replace(profile, **costs)
            for profile, costs in zip(static[:-1], rounds.costs(subject.chunks), strict=True)
        ),
        rounds.carried,
        static[-1],
        max(subject.microbatches),
        subject.chunks,
        rounds.meter.unit,
        str(device),
        rounds.output,
    )


def _stages(partitions: Sequence[Partition], device: torch.device) -> list[Stage]:
    """Return a stage for each layer, which copies parameters that are on another device."""
    layers = [layer for partition in partitions for layer in partition.layers]
    routes = routes_of(skips_of(layers, partitions), partitions)
    layout = lay_out(partitions, [device], routes)
    layout = layout.with_homes({parameter: parameter.device for parameter in layout.homes})
    return [Stage(layout, j, deferred_batch_norm=True) for j in range(layout.n)]
