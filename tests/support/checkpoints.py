"""What is in a checkpoint, to compare one of a pipeline with one of a plain run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def load(path: Path) -> dict[str, Any]:
    """The contents of a file, with tensors where they were."""
    return torch.load(path, weights_only=False)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of a nested value with what is there; containers give their type."""
    if isinstance(value, dict):
        yield path, type(value)
        for key, item in value.items():
            yield from leaves(item, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        yield path, type(value)
        for k, item in enumerate(value):
            yield from leaves(item, f"{path}[{k}]")
    else:
        yield path, value


def structure(checkpoint: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Keys in order, with the types of what is there, and types and shapes of tensors."""
    return [
        (path, leaf.dtype, leaf.shape, leaf.requires_grad, type(leaf))
        if isinstance(leaf, Tensor)
        else (path, leaf if isinstance(leaf, type) else type(leaf))
        for path, leaf in leaves(checkpoint)
    ]


def numbers(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The tensors and numbers of what is trained and what trains it, by path."""
    return {
        path: leaf
        for key in ("state_dict", "optimizer_states", "lr_schedulers")
        for path, leaf in leaves(checkpoint[key], key)
        if isinstance(leaf, Tensor | int | float)
    }
