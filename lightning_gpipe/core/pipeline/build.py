"""Builds the pipelines of a model: from balances to stages on their devices.

Nothing is moved, and no process connected, before all of it is checked.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import accumulate

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
from lightning_gpipe.core.programs import Route
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
    chained: bool,
    folds: bool,
    microbatching: MicroBatching | None,
    deferred_batch_norm: bool,
    threads: Threads,
    cores: int | None,
) -> None:
    """Cut the modules, connect the processes, move the layers, and attach the pipelines.

    See :class:`~lightning_gpipe.GPipe` for the arguments; the ``settings`` are resolved.
    """
    pairs = list(zip(modules, settings.balances, strict=True))
    chains = [_Chain(each) for each in ([pairs] if chained else [[pair] for pair in pairs])]
    sizes = [len(each.partitions) for each in chains]
    workers_on = tuple(choose_devices(devices, *sizes))
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
        chain.layout(places(placement=placing(size, len(workers_on))))
        for chain, size in zip(chains, sizes, strict=True)
    ]
    layout = layouts[0]
    check_cores(cores, layout.devices)
    if deferred_batch_norm:
        for each in layouts:
            check_batch_norms(each.layers, [title for x in each.partitions for title in x.titles])
    connection = None
    if layout.spread:
        devices_here = dict(zip(layout.workers_here, layout.devices_here, strict=True))
        names = [each.name for each in chains]
        connection = join_processes(group, lost_after, names, devices_here)
    place_all(modules[0].root, layouts)
    workers = Workers(*layouts)
    pipelines = [
        Pipeline(
            layout,
            settings,
            microbatching=microbatching or Rows(at_least=max(map(rows_needed, chain.inner))),
            deferred_batch_norm=deferred_batch_norm,
            threads=threads,
            cores=cores,
            workers=workers,
            connection=connection,
            number=number,
        )
        for number, (chain, layout) in enumerate(zip(chains, layouts, strict=True))
    ]
    _attach_all(chains, pipelines)


class _Chain:
    """The modules of one pipeline, cut by a balance each: the stages of one after another's."""

    def __init__(self, pairs: Sequence[tuple[PipedModule, Sequence[int]]]) -> None:
        self.modules = [piped for piped, _ in pairs]
        self.inner = [piped.module for piped in self.modules]
        *starts, n = accumulate((len(balance) for _, balance in pairs), initial=0)
        self._starts = tuple(starts)
        self._cuts: list[list[Partition]] = []  # of each module
        for (piped, balance), first in zip(pairs, starts, strict=True):
            piped.frontend.place(first, n)
            self._cuts.append(piped.frontend.partitions(balance))
        self.partitions = [partition for cut in self._cuts for partition in cut]

    @property
    def name(self) -> str:
        return " and ".join(piped.name for piped in self.modules)

    def layout(self, places: Layout) -> Layout:
        """Lay it out; the parameters that are used around its layers have their home there."""
        root = self.modules[0].root
        routes = [route for cut in self._cuts for route in _skip_routes(cut)]
        layout = replace(places.recut(self.partitions, routes), starts=self._starts)
        check_sharing(layout)
        check_outside(root, self.inner, layout, layout.outside)
        own = [parameter for piped in self.modules for parameter in piped.frontend.own]
        return layout.with_everywhere([*own, *shared_with_outside(root, self.inner)])


def _skip_routes(partitions: Sequence[Partition]) -> Sequence[Route]:
    layers = [layer for partition in partitions for layer in partition.layers]
    stage_of = stages_of_layers(partitions)
    return routes_of(skips_of(layers, stage_of), stage_of)


def _attach_all(chains: Sequence[_Chain], pipelines: Sequence[Pipeline]) -> None:
    """Let calls of the modules run the pipelines, which have their observers together."""
    for chain, pipeline in zip(chains, pipelines, strict=True):
        pipeline.engine.succeed(pipelines[0].engine)
        for piped, stages in zip(chain.modules, pipeline.layout.modules, strict=True):
            piped.attach(pipeline, stages)


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
        new, old = ([list(sizes) for sizes in each] for each in (balances, before))
        several = len(modules) > 1
        raise ValueError(
            "a new balance must have as many stages as the pipeline has: got "
            f"{new if several else new[0]} in the place of {old if several else old[0]}."
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
        piped.frontend.remove()
    try:
        rebuild(modules, balances, move=True)
    except BaseException:
        rebuild(modules, before, move=True)
        raise


def rebuild(
    modules: Sequence[PipedModule], balances: Sequence[Sequence[int]], *, move: bool = False
) -> None:
    """Make the programs and engines again, by balances, and move the layers if asked."""
    pairs = list(zip(modules, balances, strict=True))
    pipelines = list(dict.fromkeys(piped.pipeline for piped in modules))
    chains, layouts = [], []
    for pipeline in pipelines:
        old = pipeline.layout
        chain = _Chain([pair for pair in pairs if pair[0].pipeline is pipeline])
        homes = {parameter: old.homes[parameter] for parameter in old.everywhere}
        chains.append(chain)
        layouts.append(chain.layout(old).with_everywhere(homes).with_homes(homes))
    if move:
        place_all(modules[0].root, layouts)
    workers = Workers(*layouts)
    for pipeline, layout in zip(pipelines, layouts, strict=True):
        pipeline.rebuild(layout, workers)
    _attach_all(chains, pipelines)


def _idle(modules: Sequence[PipedModule]) -> bool:
    return all(piped.pipeline.engine.idle for piped in modules)
