"""Finds what to pipe in the user's model, and how it is cut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import Any

import torch
from torch import nn

from lightning_gpipe.core.frontends import heaviest, locate
from lightning_gpipe.core.pipeline.placing import layout_of, with_around
from lightning_gpipe.core.pipeline.taken import Layers, Programs, Taken
from lightning_gpipe.core.plan import Layout, check_enough_layers, counts_between, solve

# Numbers of units, the names of where stages begin, or "parameters".
Balance = Sequence[int] | Sequence[str] | str


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

    Raises:
        ValueError: If there is not a balance for each, or one is within another.
    """
    several = isinstance(paths, list | tuple)
    chosen = list(paths) if several else [paths]
    if len(balances) != len(chosen) or not chosen:
        raise ValueError(
            f"balance must have a list for each path in module: got {len(balances)} for {chosen}, "
            f"balance={balances!r}."
        )
    found = [take(root, path, each) for path, each in zip(chosen, balances, strict=True)]
    for one, other in permutations(found, 2):
        if other.module in one.module.modules():
            raise ValueError(
                "modules that run as pipelines must not be within one another: got "
                f"{one.path!r} and {other.path!r}. Choose one of them."
            )
    return found


def laid_out(
    taken: Taken, balance: Sequence[int], devices: Sequence[str | torch.device] | None
) -> Layout:
    """The layout of what was taken, checked; nothing is moved."""
    layout = layout_of(taken.partitions(balance), devices)
    return with_around(layout, taken.root, taken.module, taken.own)


def layers_in(layout: Layout) -> tuple[list[nn.Module], list[str]]:
    """The layers, and what errors call them."""
    layers = [layer for partition in layout.partitions for layer in partition.layers]
    return layers, [title for partition in layout.partitions for title in partition.titles]


def taken_at(root: nn.Module, path: str, module: nn.Module) -> Taken:
    """What runs as a pipeline, if it was found already; the type of ``module`` decides how."""
    if isinstance(module, nn.Sequential):
        return Layers(root, path, module)
    return Programs(root, path, module)


def balance_for(taken: Taken, balance: Any, stages: int | None) -> Sequence[int]:
    """The number of units in each stage.

    Args:
        taken: What is cut.
        balance: As the user gave it: numbers, names of units where stages begin, or
            ``"parameters"``.
        stages: The number of stages if the balance does not tell; None if nothing does.

    Raises:
        TypeError, ValueError: If the balance is none of these, or does not fit.
    """
    if balance == "parameters":
        if stages is None:
            raise ValueError(
                "balance='parameters' gives each device a stage, so devices must be given: got "
                "devices=None. Write devices=['cuda:0', 'cuda:1'], or a list of numbers."
            )
        check_enough_layers(len(taken.units), stages, taken.name)
        return solve(taken.costs(), stages)
    if isinstance(balance, list | tuple) and balance and all(isinstance(b, str) for b in balance):
        return counts_between(balance, taken.units, taken.name, taken.path)
    chosen: Sequence[int] = balance
    return chosen  # whatever it is: who cuts by it says what is wrong with it
