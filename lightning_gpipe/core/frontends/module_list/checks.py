"""Checks whether the blocks of an nn.ModuleList can be cut into stages."""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import is_lazy


def check_model(model: nn.Module, path: str) -> None:
    """Refuse an nn.ModuleList for a model: it has no forward that would loop over it."""
    if not path:
        raise TypeError(
            "module must be an nn.Sequential, or a model whose forward calls its blocks: got "
            f"{type(model).__qualname__}, which has no forward. Give the model that loops over it, "
            "and where it is there, as in GPipe(model, balance, module='layers')."
        )


def check_blocks(module: nn.Module, name: str = "module") -> None:
    """Refuse a module that is not an nn.ModuleList of distinct, initialised blocks.

    Raises:
        TypeError: If it is no nn.ModuleList, or a module in it cannot be called.
        ValueError: If it is empty, or has a block twice, or lazy parameters.
    """
    if not isinstance(module, nn.ModuleList):
        raise TypeError(
            f"{name} must be an nn.ModuleList that a forward loops over: got "
            f"{type(module).__qualname__}."
        )
    if not len(module):
        raise ValueError(f"{name} must have at least one block: got an empty nn.ModuleList.")
    blocks = list(module)
    groups = [
        k for k, block in enumerate(blocks) if isinstance(block, nn.ModuleList | nn.ModuleDict)
    ]
    if groups:
        raise TypeError(
            f"{name} must hold modules that are called: got a {type(blocks[groups[0]]).__name__} "
            f"at index {groups[0]}. Choose one of those within it."
        )
    seen: dict[nn.Module, int] = {}
    for k, block in enumerate(blocks):
        if block in seen:
            raise ValueError(
                f"{name} must have each block object only once, because a block is on one stage: "
                f"got {type(block).__qualname__} at {seen[block]} and {k}. Make an object for each "
                "block; to share weights, assign the same nn.Parameter to both."
            )
        seen[block] = k
    lazy = [k for k, block in enumerate(blocks) if any(map(is_lazy, block.parameters()))]
    if lazy:
        raise ValueError(
            f"the parameters of {name} must be initialised: got lazy parameters in blocks {lazy}. "
            "Run the model once on a small batch first."
        )
