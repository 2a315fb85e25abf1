"""Finds what to pipe in the user's model, and lays it out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import Any

import torch
from torch import nn

from lightning_gpipe.core.data import MicroBatching, PaddedSequences, Rows
from lightning_gpipe.core.frontends import heaviest, locate
from lightning_gpipe.core.pipeline.taken import Layers, Programs, Taken
from lightning_gpipe.core.plan import (
    Around,
    Layout,
    Partition,
    Placing,
    check_outside,
    check_sharing,
    check_whole,
    lay_out,
    looped,
    shared_with_outside,
)
from lightning_gpipe.core.skip import routes_of, skips_of


def take(root: nn.Module, path: str | Taken | None, balance: Any = None) -> Taken:
    """What runs as a pipeline.

    Args:
        root: The user's model.
        path: Where it is in the model. None takes the model itself, unless the balance counts the
            layers of the nn.Sequential or nn.ModuleList with more than half of its parameters, or
            names some of them. What was taken before is taken again.
        balance: As the user gave it.

    Raises:
        TypeError, ValueError: If nothing is there, or it cannot run as a pipeline.
    """
    if isinstance(path, Taken):
        return path
    if not isinstance(root, nn.Module):
        raise TypeError(
            f"what runs as a pipeline must be a module: got {type(root).__name__}. Put the layers "
            "into an nn.Sequential."
        )
    if path is not None:
        found = locate(root, path)
    else:
        heavy = None if isinstance(root, nn.Sequential) else heaviest(root)
        found = heavy if heavy is not None and _is_of(balance, *heavy) else ("", root)
    return taken_at(root, *found)


def _is_of(balance: Any, path: str, module: nn.Module) -> bool:
    """Whether a balance is one of the layers of a part of the model, and not of the model.

    The heaviest nn.Sequential of a U-Net or a residual network is not what its author calls layers.
    """
    if not isinstance(balance, list | tuple):
        return isinstance(module, nn.ModuleList)  # a loop over blocks can seldom be traced
    if all(isinstance(each, str) for each in balance):
        layers = {name for name, _ in module.named_children()}
        return {each.removeprefix(f"{path}.") for each in balance} <= layers
    return sum(each for each in balance if isinstance(each, int)) == len(list(module.children()))


def take_all(root: nn.Module, paths: Any, balances: Sequence[Any]) -> list[Taken]:
    """What runs as a pipeline: one for each path of a list, or the one of a single path.

    Args:
        root: The user's model.
        paths: As the user gave them.
        balances: The balance of each.

    Raises:
        ValueError: If one is within another, or there twice.
    """
    chosen = list(paths) if isinstance(paths, list | tuple) else [paths]
    found = [take(root, path, each) for path, each in zip(chosen, balances, strict=True)]
    for one, other in permutations(found, 2):
        if other.module in one.module.modules():
            raise ValueError(
                "modules that run as pipelines must not be within one another: got "
                f"{one.path!r} and {other.path!r}. Choose one of them."
            )
    return found


def check_entries(found: Sequence[Taken], microbatching: MicroBatching | None) -> None:
    """Refuse to make micro-batches by what only a whole batch has where layers do not get one.

    Raises:
        TypeError: Names the module.
    """
    for taken in found:
        if isinstance(microbatching, PaddedSequences) and not isinstance(taken, Layers):
            raise TypeError(
                "PaddedSequences needs a batch with lengths, as an nn.Sequential is called with: "
                f"got {taken.name} ({type(taken.module).__name__}), whose layers get values of its "
                "forward. Leave out microbatching, and sort the rows of a batch by their length if "
                "most are short."
            )
        if isinstance(microbatching, Rows) and microbatching.dims and not isinstance(taken, Layers):
            raise ValueError(
                f"{microbatching} is for an nn.Sequential, whose layers get what the batch is: got "
                f"{taken.name} ({type(taken.module).__name__}), whose layers get other values too, "
                "and all must have their rows in dim 0. Let the model transpose its input before "
                "its layers, with batch_first=True where they have it."
            )


def laid_out(
    taken: Taken,
    partitions: Sequence[Partition],
    devices: Sequence[torch.device],
    around: Around,
    owners: Sequence[int] = (),
    rank: int = 0,
    place: Placing = looped,
) -> Layout:
    """The layout of what was taken, in these partitions, on these devices; nothing is moved.

    The parameters that are used around the layers too have their home there.

    Args:
        taken: What was taken.
        partitions: What each stage runs.
        devices: The device of each worker.
        around: Which stage what is around is with.
        owners: The process of each worker; none where there is one process.
        rank: That of this process.
        place: Gives each stage its worker.

    Raises:
        TypeError, ValueError: If stages share what they must not with others or with what is
            around them.
    """
    layers = [layer for partition in partitions for layer in partition.layers]
    routes = routes_of(skips_of(layers, partitions), partitions)
    layout = lay_out(partitions, devices, routes, around, owners, rank, place)
    check_sharing(layout)
    check_outside(taken.root, taken.module, layout, layout.outside)
    shared = [*taken.own, *shared_with_outside(taken.root, taken.module)]
    return layout.with_everywhere(shared)


def layers_in(layout: Layout) -> tuple[list[nn.Module], list[str]]:
    """The layers, and what errors call them."""
    layers = [layer for partition in layout.partitions for layer in partition.layers]
    return layers, [title for partition in layout.partitions for title in partition.titles]


def taken_at(root: nn.Module, path: str, module: nn.Module) -> Taken:
    """What runs as a pipeline, if it was found already; the type of ``module`` decides how.

    Raises:
        TypeError: If it cannot run as a pipeline, or its parameters are shards.
    """
    check_whole([(path, module)])
    if isinstance(module, nn.Sequential):
        return Layers(root, path, module)
    return Programs(root, path, module)
