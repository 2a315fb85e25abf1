"""Detects layers that mix the rows of a mini-batch.

A mini-batch is cut in dim 0 unless the user says otherwise. Attention and recurrent layers with
``batch_first=False`` have the time there: they would compute something else without an error.

A layer may transpose its input, so in the first mini-batch of a call signature the shapes that the
modules inside of the layers get are recorded. If the dim that a module mixes has as many elements
as the micro-batch has rows, in all micro-batches, it was cut::

    micro-batches of 3, 3 and 2 rows of (8, 5, 16), attention with batch_first=False

    it gets    (3, 5, 16)  (3, 5, 16)  (2, 5, 16)     the time was cut
               (5, 3, 16)  (5, 3, 16)  (5, 2, 16)     a layer has transposed, which is right

If all micro-batches have the same size, :func:`_was_cut` decides. Undecidable cases are allowed,
and so is a single micro-batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_gpipe.core.data import Division, tree_flatten
from lightning_gpipe.core.faithful.journal import Journal, Write
from lightning_gpipe.core.faithful.layers.mixed_dims import (
    RECOGNISED,
    MixedDim,
    continues,
    mixed_by,
)
from lightning_gpipe.core.faithful.managers import Manager
from lightning_gpipe.core.faithful.state.behavior import record

_Layout = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides


class _WatchedModule(NamedTuple):
    """A module to watch, the layer that it is in, and its name there."""

    layer: nn.Module
    title: str
    name: str
    module: nn.Module

    def __str__(self) -> str:
        inner = f": its {self.name} ({type(self.module).__name__})" if self.name else ""
        return f"{self.title}{inner}"


class RowWatches:
    """Selects the mini-batches of a stage to watch: the first of each call signature."""

    def __init__(self, layers: Sequence[tuple[nn.Module, str]]) -> None:
        self._watched = [each for layer, title in layers for each in _watched_in(layer, title)]
        self._signatures: dict[Hashable, None] = {}

    def begin(
        self, signature: Hashable, division: Callable[[], Division | None]
    ) -> RowWatch | None:
        if not self._watched or signature in self._signatures:
            return None
        cut = division()
        if cut is None or len(cut.sizes) < 2:
            return None
        return RowWatch(self._watched, cut, partial(record, self._signatures, signature, None))


class RowWatch:
    """Records the inputs of the modules of one stage in one mini-batch."""

    def __init__(
        self, watched: Sequence[_WatchedModule], division: Division, done: Callable[[], None]
    ) -> None:
        self._watched = watched
        self._division = division
        self._done = done
        self._calls: dict[Hashable, tuple[_WatchedModule, dict[int, MixedDim]]] = {}
        self._arrived: list[_Layout] = []

    def watching(self, i: int, journal: Journal) -> Manager:
        return journal.changed(self.writes(i))

    def close(self) -> None:
        """Record that this call signature was watched; raise if a module mixed the rows."""
        for watched, inputs in self._calls.values():
            if len(inputs) == len(self._division.sizes) and _was_cut(inputs, self._division):
                raise ValueError(self._describe(watched, inputs[0]))
        self._done()

    def writes(self, i: int) -> list[Write]:
        count: Counter[nn.Module] = Counter()
        writes: list[Write] = []
        for layer in dict.fromkeys(each.layer for each in self._watched):
            if not isinstance(layer, RECOGNISED):
                writes.append((vars(layer), "forward", partial(self._arrive, layer.forward)))
        for watched in self._watched:
            module = watched.module
            seeing = partial(self._see, watched, i, count, module.forward)
            writes.append((vars(module), "forward", seeing))
        return writes

    def _arrive(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._arrived = _layouts(args)
        return forward(*args, **kwargs)

    def _see(
        self,
        watched: _WatchedModule,
        i: int,
        count: Counter[nn.Module],
        forward: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        module = watched.module
        if module is watched.layer:
            self._arrived = _layouts(args)
        mixed = mixed_by(module, args, kwargs)
        if mixed is not None:
            key = module, count[module]
            count[module] += 1
            as_layer = (mixed.shape, mixed.strides) in self._arrived
            self._calls.setdefault(key, (watched, {}))[1][i] = mixed._replace(as_layer=as_layer)
        if i > 0 and continues(module, args, kwargs):
            raise ValueError(
                f"{watched} must get offsets into the indices of its micro-batch: got those of "
                f"the mini-batch, which do not begin at 0 in micro-batch {i}. The indices have no "
                "row per sample. Pad them to the shape (rows, longest), with padding_idx for the "
                "rest, and leave out the offsets."
            )
        return forward(*args, **kwargs)

    def _describe(self, watched: _WatchedModule, mixed: MixedDim) -> str:
        message = (
            f"{watched} must not mix the dim in which the mini-batch was cut: got shape "
            f"{mixed.shape} in micro-batch 0, and it mixes dim {mixed.dim} ({mixed.how}), which "
            f"has the rows of each micro-batch: {', '.join(map(str, self._division.sizes))}. "
        )
        if not mixed.rows:
            return message + (
                "Add a batch dimension to the mini-batch, as DataLoader(batch_size=1) does, or "
                "write chunks=1."
            )
        dim = mixed.rows[0] if len(mixed.rows) == 1 else "..."
        where = "another dim" if dim == "..." else f"dim {dim}"
        return message + (
            f"If the rows of the mini-batch are in {where}, write microbatching=Rows(dim={dim}) "
            f"for an nn.Sequential.{mixed.cure} Or write chunks=1."
        )


def _was_cut(inputs: dict[int, MixedDim], division: Division) -> bool:
    """Return whether the dim that a module mixes is the one in which the mini-batch was cut.

    If all micro-batches have one size, that may be by chance the length of the time, of a table, or
    of windows or heads folded into the batch dimension. Then the batch dimension must be another
    dim of the mini-batch. If it is a multiple of the rows, or there is none, the tensor must also
    have the layout of the layer's own input, unlike windows that were moved to the front.
    """
    sizes, widths = division
    got = [inputs[i] for i in range(len(sizes))]
    dim, rows = got[0].dim, got[0].rows

    def has_rows(k: int) -> bool:
        return all(each.shape[k] == size for each, size in zip(got, sizes, strict=True))

    if not has_rows(dim) or any(map(has_rows, rows)):
        return False
    if len(set(sizes)) > 1:
        return True
    batch = [got[0].shape[k] for k in rows]
    if len(batch) != 1:
        return got[0].as_layer
    return batch[0] in widths and (batch[0] % sizes[0] != 0 or got[0].as_layer)


def _watched_in(layer: nn.Module, title: str) -> list[_WatchedModule]:
    """Return the modules to watch in a layer, without those inside of compiled ones."""
    watched = []
    waiting = [("", layer)]
    while waiting:
        name, module = waiting.pop()
        if module._compiled_call_impl is not None or "_orig_mod" in module._modules:
            continue  # watching would compile it again
        if isinstance(module, RECOGNISED):
            watched.append(_WatchedModule(layer, title, name, module))
        waiting += [
            (f"{name}.{inner}".lstrip("."), child)
            for inner, child in list(module.named_children())[::-1]
        ]
    return watched


def _layouts(args: Sequence[Any]) -> list[_Layout]:
    try:
        leaves = tree_flatten(list(args)).leaves
    except TypeError:
        return []
    dense = [x for x in leaves if isinstance(x, Tensor) and x.layout is torch.strided]
    return [(tuple(x.shape), x.stride()) for x in dense if not x.is_nested]
