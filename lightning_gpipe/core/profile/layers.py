"""Profiles the layers of a model one by one: their time, operations and memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpipe.core.balance import LayerProfile, ModelProfile
from lightning_gpipe.core.data import bytes_of
from lightning_gpipe.core.faithful import parameters_preserved, preserved
from lightning_gpipe.core.layout import Partition, lay_out, stages_of_layers
from lightning_gpipe.core.profile.optimizers import Optimizers, optimizer_bytes
from lightning_gpipe.core.profile.rounds import Rounds
from lightning_gpipe.core.programs import Program
from lightning_gpipe.core.run import Stage
from lightning_gpipe.core.skip import routes_of, skips_of


@dataclass(frozen=True)
class Subject:
    """The layers to profile, each a partition, and their inputs.

    Attributes:
        beside: Other piped modules of the model, which are not around these layers.
        microbatches: Micro-batches by their number of rows, from the largest.
        chunks: How many of them the mini-batch has, by their number of rows. For each there is a
            profile, and the next smaller micro-batch tells the costs per row from fixed ones.
    """

    root: nn.Module
    layers: Sequence[Partition]
    names: Sequence[str]
    beside: Sequence[nn.Module]
    program: Program
    microbatches: Mapping[int, Any]
    chunks: Mapping[int, int]


def profile_layers(
    subject: Subject, device: torch.device, optimizer: Optimizers = None, *, split: bool = False
) -> list[ModelProfile]:
    """Measure what each layer costs in micro-batches of each size, in the caller's autocast.

    Layers are in training mode. Parameters, gradients, buffers, attributes of layers and random
    generators do not change. Raises a TypeError or a ValueError for the optimizer, or the error of
    a layer with a note.
    """
    stages = _stages(subject.layers, device)
    modules = [module for stage in stages for module in stage.modules]
    state_bytes = optimizer_bytes(subject.root.parameters(), optimizer)
    (empty,) = _stages([Partition(0, 0, (nn.Identity(),))], device)
    rounds = Rounds(subject.program, subject.microbatches, stages, empty, device, split)
    with preserved(modules, [device]), parameters_preserved(modules), torch.enable_grad():
        rounds.run()
    *static, around = _static_costs(subject, state_bytes)
    return [
        ModelProfile(
            tuple(
                replace(profile, **costs)
                for profile, costs in zip(static, rounds.costs(rows, chunks), strict=True)
            ),
            rounds.carried(rows),
            around,
            rows,
            chunks,
            rounds.meter.unit,
            str(device),
            rounds.output(rows),
        )
        for rows, chunks in subject.chunks.items()
    ]


def _stages(partitions: Sequence[Partition], device: torch.device) -> list[Stage]:
    """Return a stage for each layer, which copies parameters that are on another device."""
    layers = [layer for partition in partitions for layer in partition.layers]
    stage_of = stages_of_layers(partitions)
    routes = routes_of(skips_of(layers, stage_of), stage_of)
    layout = lay_out(partitions, [device], routes)
    layout = layout.with_homes({parameter: parameter.device for parameter in layout.homes})
    return [Stage(layout, j, deferred_batch_norm=True) for j in range(layout.n)]


def _static_costs(subject: Subject, state_bytes: Mapping[int, int]) -> list[LayerProfile]:
    """Count tensors and optimizer states of layers, shared ones once, and of what is around."""
    counted: set[int] = set()
    layers = [partition.layers for partition in subject.layers]
    groups: list[tuple[str, Sequence[nn.Module]]] = [
        *zip(subject.names, layers, strict=True),
        ("beside", subject.beside),
        ("around", [subject.root]),
    ]
    profiles = [_profile(name, modules, counted, state_bytes) for name, modules in groups]
    return [*profiles[:-2], profiles[-1]]


def _profile(
    name: str, modules: Sequence[nn.Module], counted: set[int], state_bytes: Mapping[int, int]
) -> LayerProfile:
    parameters = _uncounted((p for module in modules for p in module.parameters()), counted)
    buffers = _uncounted((b for module in modules for b in module.buffers()), counted)
    return LayerProfile(
        name,
        parameters=sum(p.numel() for p in parameters),
        parameter_bytes=sum(map(bytes_of, parameters)),
        gradient_bytes=sum(bytes_of(p) for p in parameters if p.requires_grad),
        optimizer_bytes=sum(state_bytes.get(id(p), 0) for p in parameters),
        buffer_bytes=sum(map(bytes_of, buffers)),
    )


def _uncounted(tensors: Iterable[Tensor], counted: set[int]) -> list[Tensor]:
    """Return the tensors that are not counted yet, and count them."""
    new = {id(tensor): tensor for tensor in tensors if id(tensor) not in counted}
    counted.update(new)
    return list(new.values())
