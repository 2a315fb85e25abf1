"""Locates the modules to pipe in the user's model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import Any

from torch import nn

from lightning_gpipe.core.data import MicroBatching, PaddedSequences, Rows
from lightning_gpipe.core.frontends import heaviest, locate
from lightning_gpipe.core.layout import layers_of
from lightning_gpipe.core.pipeline.piped_module import PipedModule


def take(root: nn.Module, path: str | PipedModule | None, balance: Any = None) -> PipedModule:
    """Return the piped module at a path.

    None takes the model itself, unless the balance counts or names the layers of the nn.Sequential
    or nn.ModuleList with more than half of its parameters. A piped module is returned as it is.
    """
    if isinstance(path, PipedModule):
        return path
    if not isinstance(root, nn.Module):
        raise TypeError(
            f"what runs as a pipeline must be a module: got {type(root).__name__}. Put the layers "
            "into an nn.Sequential."
        )
    if path is not None:
        return PipedModule(root, *locate(root, path))
    heavy = None if isinstance(root, nn.Sequential) else heaviest(root)
    if heavy is not None and _is_balance_of(balance, *heavy):
        return PipedModule(root, *heavy)
    return PipedModule(root, "", root)


def _is_balance_of(balance: Any, path: str, module: nn.Module) -> bool:
    """Return whether a balance is for the layers of a module, and not of the model around it.

    The heaviest nn.Sequential of a U-Net or a residual network is not what its author calls layers.
    """
    if not isinstance(balance, list | tuple):
        return isinstance(module, nn.ModuleList)  # a loop over blocks can seldom be traced
    if all(isinstance(begin, str) for begin in balance):
        layers = {name for name, _ in module.named_children()}
        return {begin.removeprefix(f"{path}.") for begin in balance} <= layers
    counts = {len(list(module.children()))}
    if isinstance(module, nn.Sequential):
        counts.add(len(layers_of(module)))
    return sum(size for size in balance if isinstance(size, int)) in counts


def take_all(root: nn.Module, paths: Any, balances: Sequence[Any]) -> list[PipedModule]:
    """Return the piped module of each path of a list, or of a single path; none within another."""
    listed = list(paths) if isinstance(paths, list | tuple) else [paths]
    pairs = zip(listed, balances, strict=True)
    modules = [take(root, path, balance) for path, balance in pairs]
    for one, other in permutations(modules, 2):
        if other.module in one.module.modules():
            raise ValueError(
                "modules that run as pipelines must not be within one another: got "
                f"{one.path!r} and {other.path!r}. Choose one of them."
            )
    return modules


def check_entries(modules: Sequence[PipedModule], microbatching: MicroBatching | None) -> None:
    """Refuse a way to cut whole batches for layers that get other values."""
    for piped in modules:
        if piped.frontend.takes_batch:
            continue
        if isinstance(microbatching, PaddedSequences):
            raise TypeError(
                "PaddedSequences needs a batch with lengths, as an nn.Sequential is called with: "
                f"got {piped.name} ({type(piped.module).__name__}), whose layers get values of its "
                "forward. Leave out microbatching, and sort the rows of a batch by their length if "
                "most are short."
            )
        if isinstance(microbatching, Rows) and microbatching.dims:
            raise ValueError(
                f"{microbatching} is for an nn.Sequential, whose layers get what the batch is: got "
                f"{piped.name} ({type(piped.module).__name__}), whose layers get other values too, "
                "and all must have their rows in dim 0. Let the model transpose its input before "
                "its layers, with batch_first=True where they have it."
            )
