"""The contents of lists, dicts, sets, deques, arrays and tensors that modules hold in attributes.

They change without the attribute being set: ``self.seen.append(x)``, ``self.mean.mul_(0.9)``. To
notice it they must be copied. Small containers always are; large ones and tensors only in the first
run, and in later runs if earlier ones changed them. Very large ones are only then looked into.
NumPy arrays are treated as large containers are, if they are not very large.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from operator import is_
from typing import Any, NamedTuple, NoReturn
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.function import Function

from lightning_gpipe.core.faithful.journal import Slots, Write, value_in
from lightning_gpipe.core.faithful.values import same_value, version_of
from lightning_gpipe.core.plan import CONTAINERS, contents, within

Left = tuple[Slots, Any, "ref[Tensor]"]  # a tensor with a graph that a first forward left there

_LARGE = 64  # elements
_VERY_LARGE = 1024  # elements, which are looked at in the first run only
_LARGEST_ARRAY = 2**20  # bytes; larger ones may be data sets


class _Value(NamedTuple):
    """A tensor as it was; its value if it was copied."""

    tensor: Tensor
    version: int
    copy: Tensor | None

    @classmethod
    def of(cls, tensor: Tensor, *, copied: bool) -> _Value:
        return cls(tensor, version_of(tensor), tensor.detach().clone() if copied else None)

    def moved(self, *, compared: bool) -> bool:
        """Whether it was edited; ``compared``: by its value too, which a GPU is waited for."""
        if version_of(self.tensor) != self.version:
            return True
        return compared and self.copy is not None and not same_value(self.tensor, self.copy)


class _Shallow(NamedTuple):
    """A container as it was; its elements if they were copied."""

    container: Any
    size: int
    copy: Any

    @classmethod
    def of(cls, container: Any, *, copied: bool) -> _Shallow:
        size = len(container)
        return cls(container, size, _elements(container) if copied or size <= _LARGE else None)

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


class _Array(NamedTuple):
    """A NumPy array as it was."""

    array: Any
    copy: Any

    @property
    def moved(self) -> bool:
        return bool(self.array.tobytes() != self.copy.tobytes())  # a NaN is equal to itself


class Contents:
    """The contents of one object that a module holds, before a run.

    Args:
        value: The object.
        copied: Whether to copy large containers and tensors; small containers always are.
    """

    def __init__(self, value: Any, *, copied: bool) -> None:
        found = list(within(value, largest=math.inf if copied else _VERY_LARGE))
        self._containers = [
            _Shallow.of(each, copied=copied) for each in found if isinstance(each, CONTAINERS)
        ]
        self._values = [
            _Value.of(each, copied=copied) for each in found if isinstance(each, Tensor)
        ]
        self._arrays = [
            _Array(each, each.copy())
            for each in found
            if _is_array(each) and (copied or each.size <= _LARGE)
        ]

    def moved(self, *, compared: bool) -> bool:
        """Whether they were changed; ``compared``: compare the values of tensors too."""
        return (
            any(each.moved for each in self._containers)
            or any(each.moved for each in self._arrays)
            or any(each.moved(compared=compared) for each in self._values)
        )

    @property
    def lost(self) -> bool:
        """Whether some are not saved."""
        return any(each.copy is None for each in self._containers) or any(
            each.copy is None for each in self._values
        )

    def values(self, title: str, *, linked: bool) -> Iterator[tuple[int, Tensor]]:
        """The copies of tensors, by the ids of the tensors.

        Args:
            title: What errors call the object.
            linked: Whether layers use tensors with a gradient that they find there, so that those
                that were not edited must stay, and their graphs with them. The copies of others
                refuse a gradient.
        """
        for tensor, version, copy in self._values:
            if copy is None:
                continue
            if not tensor.requires_grad:
                yield id(tensor), copy
            elif not linked or version_of(tensor) != version:
                anchor = torch.empty(0, requires_grad=True)
                yield id(tensor), _Unlinked.apply(title, copy, anchor)

    def writes(self, values: dict[int, Tensor]) -> Iterable[Write]:
        """Restore the containers, with ``values`` instead of tensors that were edited."""
        for container, _, copy in self._containers:
            if copy is not None:
                yield _Elements(container), "elements", _replaced(copy, values)
        for array, copy in self._arrays:
            yield _Numbers(array), "numbers", copy

    def left(self) -> Iterator[Left]:
        """The tensors with a graph that were put into lists and dicts since."""
        for container, size, copy in self._containers:
            if isinstance(container, set):
                continue
            keyed = isinstance(container, dict)
            for key in container if keyed else range(len(container)):
                old = copy is not None and (key in copy if keyed else key < size)
                if not (old and copy[key] is container[key]):
                    yield from left_in(container, key)


class _Unlinked(Function):
    """A copy of a tensor whose graph is not kept; it may be edited in place."""

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
    """Whether it is, or holds, a container, an array or a tensor."""
    return any(isinstance(each, (Tensor, *CONTAINERS)) or _is_array(each) for each in within(value))


def _is_array(value: Any) -> bool:
    """Whether it is an array of numbers in memory that may change, of a size to be copied."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray):
        return False
    fixed = isinstance(value, numpy.memmap) or not value.flags.writeable
    return not (fixed or value.dtype.hasobject) and bool(value.nbytes <= _LARGEST_ARRAY)


def left_in(slots: Slots, name: Any) -> Iterator[Left]:
    """The tensor in a slot, if it has a graph."""
    tensor = value_in(slots, name)
    if isinstance(tensor, Tensor) and tensor.requires_grad:
        yield slots, name, ref(tensor)


class _Elements:
    """The elements of a container, as a slot."""

    def __init__(self, container: Any) -> None:
        self._container = container

    def __getitem__(self, name: str) -> Any:
        return _elements(self._container)

    def __setitem__(self, name: str, elements: Any) -> None:
        container = self._container
        container.clear()
        if isinstance(container, (dict, set)):
            container.update(elements)
        else:
            container.extend(elements)

    def __delitem__(self, name: str) -> None:
        raise AssertionError("a container always has elements, if only none")


class _Numbers:
    """The numbers in an array, as a slot."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __getitem__(self, name: str) -> Any:
        return self._array.copy()

    def __setitem__(self, name: str, numbers: Any) -> None:
        self._array[...] = numbers

    def __delitem__(self, name: str) -> None:
        raise AssertionError("an array always has its numbers")


def _elements(container: Any) -> Any:
    """A shallow copy, of a basic type."""
    if isinstance(container, dict):
        return dict(container)
    return set(container) if isinstance(container, set) else list(container)


def _replaced(elements: Any, values: dict[int, Tensor]) -> Any:
    if isinstance(elements, dict):
        return {key: values.get(id(each), each) for key, each in elements.items()}
    return type(elements)(values.get(id(each), each) for each in elements)
