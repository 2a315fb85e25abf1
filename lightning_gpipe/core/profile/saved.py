"""Counts the bytes that autograd saves for a backward.

A tensor that two layers save, as the output of one and the input of the next, is in memory once. So
what is on its way between layers is remembered with whether it was counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_gpipe.core.data import bytes_of


class SavedBytes:
    """What the layers save, in the order in which they run.

    Attributes:
        number: The bytes that the latest layer has saved, but for what was counted before.
    """

    def __init__(self) -> None:
        self.number = 0
        self._counted: set[int] = set()  # the storages of tensors on their way
        self._held: set[int] = set()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what is saved in a ``with`` block; its graph must outlive the block."""
        self.number = 0
        self._held.clear()

        def pack(tensor: Tensor) -> Tensor:
            key = _key(tensor)
            if key not in self._held and key not in self._counted:
                self._counted.add(key)
                self.number += _size(tensor)
            return tensor.detach()  # an output would keep its own graph alive

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield

    def ignore(self, held: Iterable[Tensor]) -> None:
        """Do not count these, which the layer holds anyway: its parameters and buffers."""
        self._held.update(map(_key, held))

    def are_counted(self, leaves: Iterable[Any]) -> list[bool]:
        """Whether each was counted."""
        return [isinstance(leaf, Tensor) and _key(leaf) in self._counted for leaf in leaves]

    def since(self, before: Iterable[bool], leaves: Iterable[Any]) -> list[int]:
        """The bytes of each that was counted since; ``before`` tells which had been already."""
        found, seen = [], set()
        for known, leaf in zip(before, leaves, strict=True):
            key = _key(leaf) if isinstance(leaf, Tensor) and not known else None
            found.append(_size(leaf) if key in self._counted and key not in seen else 0)
            seen.add(key)
        return found

    def count(self, leaves: Iterable[Any], counted: Iterable[bool]) -> None:
        """Remember that some of these were counted, in what is like them."""
        pairs = zip(leaves, counted, strict=True)
        self._counted.update(_key(leaf) for leaf, was_counted in pairs if was_counted)

    def keep(self, leaves: Iterable[Any]) -> None:
        """Remember what was counted of these, and forget all else."""
        self._counted &= {_key(leaf) for leaf in leaves if isinstance(leaf, Tensor)}


def bytes_beside(tensors: Iterable[Tensor], held: Iterable[Tensor]) -> int:
    """The bytes of some tensors, without what others hold anyway."""
    beside = set(map(_key, held))
    return sum({_key(each): _size(each) for each in tensors if _key(each) not in beside}.values())


def _key(tensor: Tensor) -> int:
    """That of its storage, which lives as long as the graph that has saved it."""
    return tensor.untyped_storage()._cdata if _has_storage(tensor) else id(tensor)


def _size(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() if _has_storage(tensor) else bytes_of(tensor)


def _has_storage(tensor: Tensor) -> bool:
    plain = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    return plain and tensor.layout is torch.strided and not tensor.is_nested
