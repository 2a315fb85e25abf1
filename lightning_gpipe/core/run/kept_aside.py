"""Where layers keep tensors with a graph, for errors to say."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from lightning_gpipe.core.plan import held_in
from lightning_gpipe.core.run.roots import leaves_behind, root_of
from lightning_gpipe.core.run.stage import Stage


def names_of_kept(stage: Stage, leaf: Tensor) -> list[str]:
    """The names of the tensors in attributes and buffers with ``leaf`` in their graph.

    They are such as ``layer 3.attention.cache['cpu']``.
    """
    return [
        name
        for name, tensor in _tensors(stage)
        if tensor.grad_fn is not None
        and any(each is leaf for each in leaves_behind([root_of(tensor)]))
    ]


def _tensors(stage: Stage) -> Iterator[tuple[str, Tensor]]:
    for title, layer in zip(stage.partition.titles, stage.partition.layers, strict=True):
        for name, value in [*held_in(layer), *layer.named_buffers()]:
            yield from _within(f"{title}.{name}", value, depth=0)


def _within(name: str, value: Any, depth: int) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif depth < _DEEPEST:
        items: Any = ()
        if isinstance(value, dict):
            items = value.items()
        elif isinstance(value, (list, tuple, deque)):
            items = enumerate(value)
        for key, each in items:
            yield from _within(f"{name}[{key!r}]", each, depth + 1)


_DEEPEST = 4  # containers in containers
