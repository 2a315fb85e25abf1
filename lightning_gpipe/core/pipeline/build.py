"""Builds the pipelines of a GPipe: from the user's arguments to stages on their devices.

The modules to pipe are located in the model, measured if a balance or a plan needs it, cut, and
laid out over the devices, in one process or several. Nothing is moved before all of it is checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from lightning_gpipe.core.data import MicroBatching, Rows
from lightning_gpipe.core.faithful import check_batch_norms, rows_needed
from lightning_gpipe.core.frontends import choose_devices
from lightning_gpipe.core.layout import Around, Layout
from lightning_gpipe.core.pipeline.choose.options import Requested, Resolved
from lightning_gpipe.core.pipeline.choose.planning import resolve
from lightning_gpipe.core.pipeline.choose.sampling import entries_with
from lightning_gpipe.core.pipeline.deployment import place_all
from lightning_gpipe.core.pipeline.piped_module import PipedModule
from lightning_gpipe.core.pipeline.pipeline import Pipeline
from lightning_gpipe.core.pipeline.selection import check_entries, layout_of, take_all
from lightning_gpipe.core.pipeline.several import Pipelines
from lightning_gpipe.core.profile import Optimizers
from lightning_gpipe.core.run import Threads
from lightning_gpipe.core.schedules import folded, looped
from lightning_gpipe.core.transport import Workers, join_processes


def build_pipelines(
    model: nn.Module,
    module: str | PipedModule | Sequence[str | PipedModule] | None,
    balances: Sequence[Any],
    requested: Requested,
    *,
    devices: Sequence[str | torch.device] | None,
    around: Around,
    folds: bool,
    microbatching: MicroBatching | None,
    deferred_batch_norm: bool,
    threads: Threads,
    sample: Any,
    optimizer: Optimizers,
    owners: Sequence[int] | None,
    group: ProcessGroup | None,
    lost_after: timedelta | None,
) -> tuple[Pipelines, Resolved]:
    """Build the pipelines, and move the layers to their devices.

    Processes are joined, if there are several. See :class:`GPipe` for arguments and errors.

    Returns:
        The pipelines, and the settings that they have.
    """
    modules = take_all(model, module, balances)
    check_entries(modules, microbatching)
    resolved = resolve(
        modules,
        balances,
        requested,
        partial(entries_with, modules, sample),
        devices or (),
        around=around,
        microbatching=microbatching,
        optimizer=optimizer,
    )
    pairs = zip(modules, resolved.balances, strict=True)
    cuts = [piped.partitions(balance) for piped, balance in pairs]
    workers_on = choose_devices(devices, *map(len, cuts))
    names = [piped.name for piped in modules]
    connection, rank = join_processes(owners, len(workers_on), group, lost_after, names)
    place = folded if folds else looped
    layouts = [
        layout_of(piped, partitions, workers_on, around, owners or (), rank, place)
        for piped, partitions in zip(modules, cuts, strict=True)
    ]
    if deferred_batch_norm:
        for layout in layouts:
            _check_batch_norms(layout)
    place_all(model, layouts)
    workers = Workers(*layouts)
    pipelines = [
        Pipeline(
            layout,
            chunks=resolved.chunks,
            activation_checkpointing=resolved.activation_checkpointing,
            microbatching=microbatching or Rows(at_least=rows_needed(piped.module)),
            deferred_batch_norm=deferred_batch_norm,
            threads=threads,
            split_backward=resolved.split_backward,
            workers=workers,
            connection=connection,
            number=number,
        )
        for number, (piped, layout) in enumerate(zip(modules, layouts, strict=True))
    ]
    return Pipelines(modules, pipelines), resolved


def _check_batch_norms(layout: Layout) -> None:
    """Refuse batch norms whose statistics cannot be updated once per mini-batch."""
    layers = [layer for partition in layout.partitions for layer in partition.layers]
    check_batch_norms(layers, [title for part in layout.partitions for title in part.titles])
