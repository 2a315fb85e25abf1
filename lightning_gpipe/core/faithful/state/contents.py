"""The contents of lists, dicts, sets, deques, arrays and tensors that modules hold in attributes.

Only a copy shows a change such as ``self.seen.append(x)`` or ``self.mean.mul_(0.9)``. Small
containers are always copied; large ones, arrays and tensors in the first run, and in later runs if
earlier ones changed them. Very large ones are scanned only in these runs; such arrays never.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import partial
from operator import is_
from typing import Any, NamedTuple, NoReturn
from weakref import ref

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import Function

from lightning_gpipe.core.data import equal
from lightning_gpipe.core.faithful.journal import Slots, ValueSlot, Write, value_in
from lightning_gpipe.core.faithful.state.behavior import version_of
from lightning_gpipe.core.layout import CONTAINERS, contents, within

Left = tuple[Slots, Any, "ref[Tensor]"]  # a tensor with a graph that a first forward left there

_LARGE = 64  # elements
_VERY_LARGE = 1024  # elements, which are scanned in the first run only
_LARGEST_ARRAY = 2**20  # bytes; larger ones may be data sets


class _SavedTensor(NamedTuple):
    """A tensor and its former version; the former value if it was copied."""

    tensor: Tensor
    version: int
    copy: Tensor | None

    def moved(self, *, compared: bool) -> bool:
        """Return whether it was edited; ``compared``: by its value, too, which waits for a GPU."""
        if version_of(self.tensor) != self.version:
            return True
        return compared and self.copy is not None and not equal(self.tensor, self.copy)


class SavedContainer(NamedTuple):
    """A container and its former size; the former elements if they were copied."""

    container: Any
    size: int
    copy: Any

    @classmethod
    def of(cls, container: Any, *, copied: bool = True) -> SavedContainer:
        return cls(container, len(container), _elements(container) if copied else None)

    @property
    def moved(self) -> bool:
        if len(self.container) != self.size:
            return True
        if self.copy is None:
            return False
        if isinstance(self.copy, set):
            return bool(self.container != self.copy)
        keys = not isinstance(self.copy, dict) or all(map(is_, self.container, self.copy))
        return not (keys and all(map(is_, contents(self.container), contents(self.copy))))

    def restore(self) -> None:
        set_elements(self.container, self.copy)


class SavedArray(NamedTuple):
    """A NumPy array and its former numbers."""

    array: Any
    copy: Any

    @property
    def moved(self) -> bool:
        return bool(self.array.tobytes() != self.copy.tobytes())  # a NaN is equal to itself

    def restore(self) -> None:
        self.array[...] = self.copy


def saved_within(value: Any) -> Iterator[SavedContainer | SavedArray]:
    """Yield copies of the containers and arrays in a value, but not in large containers."""
    for piece in within(value, largest=_LARGE):
        if isinstance(piece, CONTAINERS):
            yield SavedContainer.of(piece)
        elif _is_array(piece):
            yield SavedArray(piece, piece.copy())


class Contents:
    """The contents of one object before a run; large ones and tensors are saved if ``copied``."""

    def __init__(self, root: Any, *, copied: bool) -> None:
        self._root = root
        self._containers: list[SavedContainer] = []
        self._tensors: list[_SavedTensor] = []
        self._arrays: list[SavedArray] = []
        for piece in within(root, largest=math.inf if copied else _VERY_LARGE):
            if isinstance(piece, CONTAINERS):
                saved = SavedContainer.of(piece, copied=copied or len(piece) <= _LARGE)
                self._containers.append(saved)
            elif isinstance(piece, Tensor):
                value = piece.detach().clone() if copied else None
                self._tensors.append(_SavedTensor(piece, version_of(piece), value))
            elif _is_array(piece) and (copied or piece.size <= _LARGE):
                self._arrays.append(SavedArray(piece, piece.copy()))

    def moved(self, *, compared: bool) -> bool:
        objects: list[SavedContainer | SavedArray] = [*self._containers, *self._arrays]
        if any(each.moved for each in objects):
            return True
        return any(each.moved(compared=compared) for each in self._tensors)

    def without_copies(self) -> Contents:
        """Return the same contents, which have not moved, without copies of large ones."""
        return Contents(self._root, copied=False)

    @property
    def lost(self) -> bool:
        pieces: list[SavedContainer | _SavedTensor] = [*self._containers, *self._tensors]
        return any(piece.copy is None for piece in pieces)

    def values(self, title: str, *, linked: bool) -> Iterator[tuple[int, Tensor]]:
        """Yield the copies of tensors, with the ids of the tensors.

        ``linked``: layers use tensors with a gradient that earlier runs left there. Those that were
        not edited stay, with their graphs; other copies refuse a gradient.
        """
        for tensor, version, copy in self._tensors:
            if copy is None:
                continue
            if not tensor.requires_grad:
                yield id(tensor), copy
            elif not linked or version_of(tensor) != version:
                anchor = torch.empty(0, requires_grad=True)
                yield id(tensor), _Unlinked.apply(title, copy, anchor)

    def writes(self, values: dict[int, Tensor]) -> Iterable[Write]:
        """Yield writes of the old contents, with ``values`` instead of tensors that were edited."""
        for container, _, copy in self._containers:
            if copy is not None:
                read, write = partial(_elements, container), partial(set_elements, container)
                yield ValueSlot(read, write), "elements", _replaced(copy, values)
        for array, copy in self._arrays:
            yield ValueSlot(array.copy, partial(array.__setitem__, ...)), "numbers", copy

    def left(self) -> Iterator[Left]:
        """Yield the tensors with a graph that were put into lists and dicts since."""
        for container, size, copy in self._containers:
            if isinstance(container, set):
                continue
            keyed = isinstance(container, dict)
            for key in container if keyed else range(len(container)):
                old = copy is not None and (key in copy if keyed else key < size)
                if not (old and copy[key] is container[key]):
                    yield from left_in(container, key)


class _Unlinked(Function):
    """Copies a tensor without its graph; the copy may be edited in place."""

    @staticmethod
    def forward(ctx: Any, title: str, copy: Tensor, anchor: Tensor) -> Tensor:
        ctx.title = title
        return copy.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> NoReturn:
        raise RuntimeError(
            "layers must use tensors with a gradient that they left in an earlier forward always "
            f"or never: {ctx.title} has one that is used for the first time, and without its graph "
            "the gradient would be lost on recomputation. Compute the tensor in each forward, or "
            "keep it without its graph: value.detach()."
        )


def has_contents(value: Any) -> bool:
    """Return whether the value is, or holds, a container, an array or a tensor."""
    return any(isinstance(each, (Tensor, *CONTAINERS)) or _is_array(each) for each in within(value))


def _is_array(value: Any) -> bool:
    if not isinstance(value, np.ndarray):
        return False
    fixed = isinstance(value, np.memmap) or not value.flags.writeable
    return not (fixed or value.dtype.hasobject) and bool(value.nbytes <= _LARGEST_ARRAY)


def left_in(slots: Slots, name: Any) -> Iterator[Left]:
    """Yield the tensor in a slot, if it has a graph."""
    tensor = value_in(slots, name)
    if isinstance(tensor, Tensor) and tensor.requires_grad:
        yield slots, name, ref(tensor)


def set_elements(container: Any, elements: Any) -> None:
    """Replace the elements of a container by those of a copy."""
    container.clear()
    if isinstance(container, (dict, set)):
        container.update(elements)
    else:
        container.extend(elements)


def _elements(container: Any) -> Any:
    """Return a shallow copy, of a basic type."""
    if isinstance(container, dict):
        return dict(container.items())  # as its class shows them
    return set(container) if isinstance(container, set) else list(container)


def _replaced(elements: Any, values: dict[int, Tensor]) -> Any:
    if isinstance(elements, dict):
        return {key: values.get(id(each), each) for key, each in elements.items()}
    return type(elements)(values.get(id(each), each) for each in elements)
