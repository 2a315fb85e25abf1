"""Activations that wait in the memory of the host for their backward.

They are a stage's inputs, if the micro-batch is recomputed, or else the tensors that autograd has
saved. They leave when the micro-batch's forward has ended, so that layers may edit in place until
then, and come back as new tensors, while the action before theirs is at work.

Small tensors stay, and those that somebody else holds too, such as a weight or the input of the
next stage: to copy these would give nothing back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from lightning_gpipe.core.data import FlatTree, copy_marks
from lightning_gpipe.core.faithful import Hooks
from lightning_gpipe.core.run.host.side_copies import SideCopies
from lightning_gpipe.core.run.host.visiting_weights import memory_of
from lightning_gpipe.core.run.stage import Stage

_SMALL = 4096  # bytes, which are not worth a copy


class HostActivations:
    """The activations of one pass through a stage on a GPU, on the host while they wait."""

    def __init__(self, stage: Stage) -> None:
        self._device = stage.device
        self._copies = SideCopies(stage.device)
        self.settle = self._copies.settle
        self._saved: dict[int, list[ref[_Kept]]] = {}  # by micro-batch, until it leaves
        self._away: dict[int, list[ref[_HostMemory]]] = {}  # until they are fetched
        self._coming: dict[int, torch.cuda.Event] = {}  # until the device waits

    def around(self, i: int, hooks: Hooks) -> Hooks:
        """Return hooks by which saved tensors of micro-batch ``i`` can leave later."""
        pack, unpack = hooks
        saved = self._saved[i] = []

        def keep(tensor: Tensor) -> Any:
            if not self._may_leave(tensor):
                return pack(tensor)
            kept = _Kept(tensor)
            saved.append(ref(kept))
            return kept

        return keep, partial(_unpack, unpack)

    def leave(self, i: int) -> None:
        self._move(i, _alive(self._saved.pop(i, ())), 1)

    def take(self, i: int, inputs: FlatTree) -> FlatTree:
        kept = [_Kept(leaf) if self._may_leave(leaf) else None for leaf in inputs.leaves]
        self._move(i, [each for each in kept if each is not None], 2)
        pairs = zip(kept, inputs.leaves, strict=True)
        leaves = [leaf if x is None or x.memory is None else x for x, leaf in pairs]
        return FlatTree(leaves, inputs.spec)

    def fetch(self, i: int) -> None:
        for memory in _alive(self._away.pop(i, ())):
            memory.fetch()
            self._coming[i] = self._copies.latest

    def await_values(self, i: int) -> None:
        if (event := self._coming.pop(i, None)) is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def _may_leave(self, tensor: Any) -> bool:
        return (
            type(tensor) is Tensor
            and tensor.device == self._device
            and tensor.layout is torch.strided
            and tensor.nbytes > _SMALL
            and not (tensor.is_neg() or tensor.is_conj())
        )

    def _move(self, i: int, kept: Iterable[_Kept], holders: int) -> None:
        """Move tensors to the host, each memory once, if it has no other holders than these."""
        of_memory: dict[int, list[_Kept]] = {}
        for each in kept:
            if not each.edited:  # else its backward will raise
                of_memory.setdefault(memory_of(each.tensor), []).append(each)
        moved = []
        for group in of_memory.values():
            storage = group[0].tensor.untyped_storage()
            if torch._C._storage_Use_Count(storage._cdata) > 1 + holders * len(group):
                continue
            memory = _HostMemory(storage, self._copies)
            moved.append(memory)
            for each in group:
                each.tensor, each.memory = _NOTHING, memory
        self._away[i] = list(map(ref, moved))


def returned(inputs: FlatTree) -> FlatTree:
    """Return the inputs of a micro-batch on the device; those from the host are new tensors."""
    if not any(isinstance(leaf, _Kept) for leaf in inputs.leaves):
        return inputs
    leaves = [leaf.as_input() if isinstance(leaf, _Kept) else leaf for leaf in inputs.leaves]
    return FlatTree(leaves, inputs.spec)


_NOTHING = torch.empty(0)


class _HostMemory:
    """The memory of a tensor and of its views, on the host until it is fetched."""

    def __init__(self, storage: torch.UntypedStorage, copies: SideCopies) -> None:
        content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        self._device, self._copies = storage.device, copies
        self._content: Tensor | None = None
        self._host = torch.empty_like(content, device="cpu", pin_memory=True)
        with copies.beside("to the host") as stream:
            self._host.copy_(content, non_blocking=True)
            content.record_stream(stream)
        self._left = copies.latest

    def fetch(self) -> None:
        self._content = torch.empty_like(self._host, device=self._device)
        with self._copies.beside("to the device") as stream:
            stream.wait_event(self._left)
            self._content.copy_(self._host, non_blocking=True)
        self._came = self._copies.latest

    def view(self, dtype: torch.dtype, *geometry: Any) -> Tensor:
        """Return a view of it on the device; later computation waits for it."""
        if self._content is None:
            self.fetch()
        assert self._content is not None, "it was fetched"
        torch.cuda.current_stream(self._device).wait_event(self._came)
        view = torch.empty(0, dtype=dtype, device=self._device)
        return view.set_(self._content.untyped_storage(), *geometry)


class _Kept:
    """A tensor kept for a backward: on the device, or as a view of memory on the host."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()
        self.memory: _HostMemory | None = None
        self.view = tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()
        self._version = tensor._version
        self._requires_grad = tensor.requires_grad
        self._marked = copy_marks(tensor, torch.empty(0))

    @property
    def edited(self) -> bool:
        return self.memory is None and self.tensor._version != self._version

    @property
    def value(self) -> Tensor:
        if self.memory is not None:
            return self.memory.view(*self.view)
        if self.edited:
            raise RuntimeError("a tensor that is needed was modified by an inplace operation")
        return self.tensor

    def as_input(self) -> Tensor:
        return copy_marks(self._marked, self.value.detach()).requires_grad_(self._requires_grad)


def _unpack(unpack: Callable[[Any], Tensor], saved: Any) -> Tensor:
    return saved.value if isinstance(saved, _Kept) else unpack(saved)


def _alive(references: Iterable[ref[Any]]) -> list[Any]:
    return [each for reference in references if (each := reference()) is not None]
