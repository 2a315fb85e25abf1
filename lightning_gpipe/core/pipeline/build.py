"""Builds the pipelines of a model: from balances to stages on their devices.

The modules are cut, and laid out over the devices, in one process or several. Nothing is moved
before all of it is checked.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import nn
from torch.distributed import ProcessGroup

from lightning_gpipe.core.faithful import check_batch_norms
from lightning_gpipe.core.frontends import (
    check_unread_weights,
    choose_devices,
    forget,
    forget_values,
    is_in_another_process,
    move,
    place,
    place_around,
    replaceable,
)
from lightning_gpipe.core.layout import (
    META,
    Around,
    Layout,
    Partition,
    check_balance,
    check_outside,
    check_sharing,
    lay_out,
    shared_with_outside,
)
from lightning_gpipe.core.pipeline.piped_module import PipedModule
from lightning_gpipe.core.pipeline.pipeline import Pipeline
from lightning_gpipe.core.schedules import folded, looped
from lightning_gpipe.core.skip import routes_of, skips_of
from lightning_gpipe.core.transport import Connection, Workers, join_processes


def lay_out_all(
    modules: Sequence[PipedModule],
    balances: Sequence[Sequence[int]],
    devices: Sequence[str | torch.device] | None,
    around: Around,
    owners: Sequence[int] | None,
    group: ProcessGroup | None,
    lost_after: timedelta | None,
    *,
    folds: bool,
) -> tuple[list[Layout], Connection | None]:
    """Cut the modules, and join the processes; see :class:`~lightning_gpipe.GPipe` for arguments.

    Returns:
        The layout of each module, and the connection to the other processes, if there are any.
    """
    pairs = zip(modules, balances, strict=True)
    cuts = [piped.frontend.partitions(balance) for piped, balance in pairs]
    workers_on = choose_devices(devices, *map(len, cuts))
    names = [piped.name for piped in modules]
    connection, rank = join_processes(owners, len(workers_on), group, lost_after, names)
    placing = folded if folds else looped
    layouts = []
    for piped, partitions in zip(modules, cuts, strict=True):
        placement = placing(len(partitions), len(workers_on))
        layouts.append(
            _layout_of(piped, partitions, workers_on, placement, around, owners or (), rank)
        )
    return layouts, connection


def _layout_of(
    piped: PipedModule,
    partitions: Sequence[Partition],
    devices: Sequence[torch.device],
    placement: Sequence[int],
    around: Around,
    owners: Sequence[int],
    rank: int,
) -> Layout:
    """Lay out one module; the parameters that are used around its layers have their home there."""
    layers = [layer for partition in partitions for layer in partition.layers]
    routes = routes_of(skips_of(layers, partitions), partitions)
    layout = lay_out(partitions, devices, routes, around, owners, rank, placement)
    check_sharing(layout)
    check_outside(piped.root, piped.module, layout, layout.outside)
    shared = shared_with_outside(piped.root, piped.module)
    return layout.with_everywhere([*piped.frontend.own, *shared])


def check_all_batch_norms(layouts: Sequence[Layout]) -> None:
    """Refuse batch norms whose statistics cannot be updated once per mini-batch."""
    for layout in layouts:
        check_batch_norms(
            layout.layers, [title for part in layout.partitions for title in part.titles]
        )


def attach_all(modules: Sequence[PipedModule], pipelines: Sequence[Pipeline]) -> None:
    """Let calls of the modules run the pipelines, which have their observers together."""
    for piped, pipeline in zip(modules, pipelines, strict=True):
        pipeline.engine.succeed(pipelines[0].engine)
        piped.attach(pipeline)


def place_all(root: nn.Module, layouts: Sequence[Layout]) -> None:
    """Move the layers to their devices, and the rest of ``root`` to the device around them.

    Layers of other processes are moved to the meta device.
    """
    check_unread_weights(root)
    layers = {layer for layout in layouts for layer in layout.layers}
    with replaceable(*root.modules()):
        place_around(root, layers, layouts[0].outside)
        for layout in layouts:
            _place(layout)
        for layout in layouts:
            move_home(layout)
    for layout in layouts:
        _check_values(layout)


def _place(layout: Layout) -> None:
    homed = {id(p) for p, home in layout.homes.items() if home != META}
    # All processes draw what they initialise from one generator, that of the CPU.
    created_on = torch.device("cpu") if layout.spread else None
    for j, partition in enumerate(layout.partitions):
        for layer in partition.layers:
            if layout.owner_of(j) == layout.rank:
                place(layer, layout.device_of(j), created_on)
            else:
                forget(layer, homed)


def move_home(layout: Layout) -> None:
    """Move parameters to their homes."""
    for parameter, device in layout.homes.items():
        if device == META:
            forget_values(parameter)
        elif parameter.device != device:
            move(parameter, device)


def _check_values(layout: Layout) -> None:
    """Refuse to be the home of parameters whose values another process has."""
    here = [parameter for parameter, home in layout.homes.items() if home != META]
    lost = [parameter for parameter in here if is_in_another_process(parameter)]
    if lost:
        raise ValueError(
            "the parameters of a stage must have values in the process that runs it: got "
            f"{len(lost)} whose values another process has, from an earlier pipeline. Cut the "
            "model as before, or load its values from a checkpoint."
        )


def recut(
    modules: Sequence[PipedModule],
    balances: Sequence[Sequence[int]],
    before: Sequence[Sequence[int]],
) -> None:
    """Cut by other balances, and move layers; after an error, restore the balances ``before``."""
    _check_recut(modules, balances, before)
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
        old, partitions = piped.pipeline.layout, piped.frontend.partitions(balance)
        layout = _layout_of(
            piped, partitions, old.devices, old.placement, old.around, old.owners, old.rank
        )
        homes = {parameter: old.homes[parameter] for parameter in old.everywhere}
        layouts.append(layout.with_everywhere(homes).with_homes(homes))
    if move:
        place_all(modules[0].root, layouts)
    workers = Workers(*layouts)
    for piped, layout in zip(modules, layouts, strict=True):
        piped.pipeline.rebuild(layout, workers)
    attach_all(modules, [piped.pipeline for piped in modules])


def _check_recut(
    modules: Sequence[PipedModule],
    balances: Sequence[Sequence[int]],
    before: Sequence[Sequence[int]],
) -> None:
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


def _idle(modules: Sequence[PipedModule]) -> bool:
    return all(piped.pipeline.engine.idle for piped in modules)
