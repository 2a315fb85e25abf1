"""Counts the bytes that autograd saves for a backward.

A tensor that two layers save, as the output of one and the input of the next, is in memory once. So
the tensors on their way between layers are remembered with whether they were counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_gpipe.core.data import bytes_of
from lightning_gpipe.core.faithful import Manager


class SavedBytes:
    """Counts the bytes that layers save: ``number`` has those of the latest, counted once."""

    def __init__(self) -> None:
        self.number = 0
        self._counted: set[int] = set()  # the storages of tensors on their way
        self._ignored: set[int] = set()

    def counting(self) -> Manager:
        """Count tensors saved in a ``with`` block; their graph must outlive the block."""
        self.number = 0
        self._ignored.clear()

        def pack(tensor: Tensor) -> Tensor:
            key = _key(tensor)
            if key not in self._ignored and key not in self._counted:
                self._counted.add(key)
                self.number += _size(tensor)
            return tensor.detach()  # an output would keep its own graph alive

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Do not count the parameters and buffers of the layer, which are in memory anyway."""
        self._ignored.update(map(_key, tensors))

    def are_counted(self, leaves: Iterable[Any]) -> list[bool]:
        """Return for each leaf whether it was counted."""
        return [isinstance(leaf, Tensor) and _key(leaf) in self._counted for leaf in leaves]

    def since(self, before: Iterable[bool], leaves: Iterable[Any]) -> list[int]:
        """Return the bytes of each leaf that was counted since ``before``, else 0."""
        sizes, seen = [], set()
        for was_counted, leaf in zip(before, leaves, strict=True):
            key = _key(leaf) if isinstance(leaf, Tensor) and not was_counted else None
            sizes.append(_size(leaf) if key in self._counted and key not in seen else 0)
            seen.add(key)
        return sizes

    def count(self, leaves: Iterable[Any], counted: Iterable[bool]) -> None:
        """Remember leaves as counted, like those of a layer that is alike."""
        pairs = zip(leaves, counted, strict=True)
        self._counted.update(_key(leaf) for leaf, was_counted in pairs if was_counted)

    def keep(self, leaves: Iterable[Any]) -> None:
        """Forget all tensors but these."""
        self._counted &= {_key(leaf) for leaf in leaves if isinstance(leaf, Tensor)}


def bytes_beside(tensors: Iterable[Tensor], others: Iterable[Tensor]) -> int:
    """Return the bytes of tensors whose memory is not that of others."""
    sizes = {_key(tensor): _size(tensor) for tensor in tensors}
    return sum(sizes[key] for key in sizes.keys() - set(map(_key, others)))


def _key(tensor: Tensor) -> int:
    """Return the address of its storage, which lives as long as the graph that has saved it."""
    return tensor.untyped_storage()._cdata if _has_storage(tensor) else id(tensor)


def _size(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() if _has_storage(tensor) else bytes_of(tensor)


def _has_storage(tensor: Tensor) -> bool:
    plain = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    return plain and tensor.layout is torch.strided and not tensor.is_nested
