"""Builds the pipelines of a model: from balances to stages on their devices.

Nothing is moved, and no process connected, before all of it is checked.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from datetime import timedelta
from functools import partial

import torch
from torch.distributed import ProcessGroup

from lightning_gpipe.core.data import MicroBatching, Rows
from lightning_gpipe.core.faithful import check_batch_norms, rows_needed
from lightning_gpipe.core.frontends import choose_devices, place_all
from lightning_gpipe.core.layout import (
    Around,
    Layout,
    Partition,
    check_balance,
    check_outside,
    check_sharing,
    shared_with_outside,
    stages_of_layers,
)
from lightning_gpipe.core.pipeline.choose.options import Resolved
from lightning_gpipe.core.pipeline.piped_module import PipedModule
from lightning_gpipe.core.pipeline.pipeline import Pipeline
from lightning_gpipe.core.run import Threads
from lightning_gpipe.core.schedules import folded, looped
from lightning_gpipe.core.skip import routes_of, skips_of
from lightning_gpipe.core.transport import Workers, check_cores, join_processes, rank_among


def build(
    modules: Sequence[PipedModule],
    settings: Resolved,
    devices: Sequence[str | torch.device] | None,
    around: Around,
    owners: Sequence[int] | None,
    group: ProcessGroup | None,
    lost_after: timedelta | None,
    *,
    folds: bool,
    microbatching: MicroBatching | None,
    deferred_batch_norm: bool,
    threads: Threads,
    cores: int | None,
) -> None:
    """Cut the modules, connect the processes, move the layers, and attach the pipelines.

    See :class:`~lightning_gpipe.GPipe` for the arguments; the ``settings`` are resolved.
    """
    pairs = zip(modules, settings.balances, strict=True)
    cuts = [piped.frontend.partitions(balance) for piped, balance in pairs]
    workers_on = tuple(choose_devices(devices, *map(len, cuts)))
    places = partial(
        Layout,
        (),
        workers_on,
        around=around,
        owners=tuple(owners or ()),
        rank=rank_among(owners, len(workers_on), group, lost_after),
        weights=settings.weights,
    )
    placing = folded if folds else looped
    layouts = [
        _layout_of(piped, parts, places(placement=placing(len(parts), len(workers_on))))
        for piped, parts in zip(modules, cuts, strict=True)
    ]
    layout = layouts[0]
    check_cores(cores, layout.devices)
    if deferred_batch_norm:
        for each in layouts:
            check_batch_norms(each.layers, [title for x in each.partitions for title in x.titles])
    connection = None
    if layout.spread:
        devices_here = dict(zip(layout.workers_here, layout.devices_here, strict=True))
        names = [piped.name for piped in modules]
        connection = join_processes(group, lost_after, names, devices_here)
    place_all(modules[0].root, layouts)
    workers = Workers(*layouts)
    pipelines = [
        Pipeline(
            layout,
            settings,
            microbatching=microbatching or Rows(at_least=rows_needed(piped.module)),
            deferred_batch_norm=deferred_batch_norm,
            threads=threads,
            cores=cores,
            workers=workers,
            connection=connection,
            number=number,
        )
        for number, (piped, layout) in enumerate(zip(modules, layouts, strict=True))
    ]
    _attach_all(modules, pipelines)


def _layout_of(piped: PipedModule, partitions: Sequence[Partition], places: Layout) -> Layout:
    """Lay out one module; the parameters that are used around its layers have their home there."""
    layers = [layer for partition in partitions for layer in partition.layers]
    stage_of = stages_of_layers(partitions)
    layout = places.recut(partitions, routes_of(skips_of(layers, stage_of), stage_of))
    check_sharing(layout)
    check_outside(piped.root, piped.module, layout, layout.outside)
    shared = shared_with_outside(piped.root, piped.module)
    return layout.with_everywhere([*piped.frontend.own, *shared])


def _attach_all(modules: Sequence[PipedModule], pipelines: Sequence[Pipeline]) -> None:
    """Let calls of the modules run the pipelines, which have their observers together."""
    for piped, pipeline in zip(modules, pipelines, strict=True):
        pipeline.engine.succeed(pipelines[0].engine)
        piped.attach(pipeline)


def recut(
    modules: Sequence[PipedModule],
    balances: Sequence[Sequence[int]],
    before: Sequence[Sequence[int]],
) -> None:
    """Cut by other balances, and move layers; after an error, restore the balances ``before``."""
    if len(balances) != len(modules):
        raise ValueError(
            f"balance must have a list for each module: got {len(balances)} for {len(modules)} "
            "modules."
        )
    for piped, balance in zip(modules, balances, strict=True):
        check_balance(balance, len(piped.frontend.units), piped.name)
    if modules[0].pipeline.layout.spread:
        raise RuntimeError(
            "a pipeline must run in one process to be cut anew: got one over several, which "
            "keep the values of their own stages only. Save a checkpoint, and resume from it "
            "with another balance."
        )
    if list(map(len, balances)) != list(map(len, before)):
        raise ValueError(
            "a new balance must have as many stages as the pipeline has: got "
            f"{list(map(list, balances))} in the place of {list(map(list, before))}."
        )
    if not _idle(modules):
        gc.collect()  # a mini-batch that nobody refers to may be in a cycle
    if not _idle(modules):
        raise RuntimeError(
            "layers must not move while a mini-batch waits for its backward: there is an "
            "output of the pipeline whose graph is alive. Call backward first, or keep "
            "output.detach()."
        )
    for piped in modules:
        piped.pipeline.close()
        piped.release()
    try:
        rebuild(modules, balances, move=True)
    except BaseException:
        rebuild(modules, before, move=True)
        raise


def rebuild(
    modules: Sequence[PipedModule], balances: Sequence[Sequence[int]], *, move: bool = False
) -> None:
    """Make the programs and engines again, by balances, and move the layers if asked."""
    layouts = []
    for piped, balance in zip(modules, balances, strict=True):
        old = piped.pipeline.layout
        layout = _layout_of(piped, piped.frontend.partitions(balance), old)
        homes = {parameter: old.homes[parameter] for parameter in old.everywhere}
        layouts.append(layout.with_everywhere(homes).with_homes(homes))
    if move:
        place_all(modules[0].root, layouts)
    workers = Workers(*layouts)
    for piped, layout in zip(modules, layouts, strict=True):
        piped.pipeline.rebuild(layout, workers)
    _attach_all(modules, [piped.pipeline for piped in modules])


def _idle(modules: Sequence[PipedModule]) -> bool:
    return all(piped.pipeline.engine.idle for piped in modules)
