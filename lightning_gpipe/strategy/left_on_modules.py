"""Values that a step leaves in attributes of modules, for processes that did not run all of it.

Lightning's hooks run in all processes and read there what steps have left: a count, or the losses
of an epoch in a list. So the first process tells the others what a step has assigned or edited, in
lists, dicts, sets and deques, too. Of a large tensor it tells the shape: others keep theirs if it
is equal, and else have one on ``meta``, of which a mean can be logged, since the first process's
value counts, but no number be read. Objects of other classes are not told.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from operator import is_
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn

from lightning_gpipe.core.faithful import set_elements, version_of
from lightning_gpipe.distributed import checksum

_SMALL = 2**16  # bytes of a tensor that is told as it is
_SMALL_ARRAY = 2**20  # the same of a NumPy array, which can be nothing else
_LONG = 1024  # elements of a container of which only the number is looked at
_DEPTH = 4  # of containers in one another
_UNSET = object()
_INTERNAL = frozenset(vars(L.LightningModule()))
_CONTAINERS = (list, dict, set, deque, tuple)
_ATOMS = (bool, int, float, complex, str, bytes, type(None))

Keys = tuple[Any, ...]  # the way to a container from the attributes of a module


class LargeTensor(NamedTuple):
    """A tensor of which other processes are told the shape; one with its checksum is equal."""

    shape: Sequence[int]
    dtype: torch.dtype
    checksum: int


class Change(NamedTuple):
    """A change of a container: the elements of a list after those that were ``kept``, or all.

    Of a dict, as the attributes of a module are, it has those that changed, and the keys of those
    that were ``removed``.
    """

    path: str
    keys: Keys
    elements: Any
    kept: int = 0
    removed: Sequence[Any] = ()


class LeftOnModules:
    """What is in the attributes of modules, by their paths, before a step."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._containers = [
            (path, container)
            for path, module in modules.items()
            for container in _containers_in(vars(module))
        ]

    def changes(self) -> Iterator[Change]:
        """Yield the changes since; those of an inner container come before the outer one's."""
        for path, before in reversed(self._containers):
            with suppress(_NotTold):
                yield from before.changes(path)


class _Container(NamedTuple):
    """A container, its size and, unless it is long, its elements and the versions of tensors."""

    keys: Keys
    container: Any
    size: int
    elements: Any
    versions: Mapping[Any, int]

    @classmethod
    def at(cls, keys: Keys, container: Any) -> _Container:
        if keys and len(container) > _LONG:
            return cls(keys, container, len(container), None, {})
        versions = {k: version_of(x) for k, x in _items(container) if type(x) is Tensor}
        return cls(keys, container, len(container), _copied(container), versions)

    def changes(self, path: str) -> Iterator[Change]:
        now, before = self.container, self.elements
        if len(now) == self.size and self._begins_alike():
            return
        if isinstance(now, dict) and before is not None:
            changed = {}
            for key, value in now.items():
                if before.get(key, _UNSET) is not value or self._edited(key):
                    with suppress(_NotTold):
                        changed[key] = _told(value)
            removed = [key for key in before if key not in now]
            if changed or removed:
                yield Change(path, self.keys, changed, removed=removed)
        elif isinstance(now, list) and len(now) > self.size and self._begins_alike():
            yield Change(path, self.keys, _told(now[self.size :]), kept=self.size)
        else:
            yield Change(path, self.keys, _told(_copied(now)))

    def _begins_alike(self) -> bool:
        now, before = self.container, self.elements
        if before is None:
            return True
        if isinstance(now, set):
            return bool(now == before)
        if isinstance(now, dict):
            same = now.keys() == before.keys() and all(map(is_, now.values(), before.values()))
        else:
            same = all(map(is_, now, before))
        return same and not any(map(self._edited, self.versions))

    def _edited(self, key: Any) -> bool:
        version = self.versions.get(key)
        return version is not None and version_of(self.elements[key]) != version


class _NotTold(Exception):
    """Raised of an object that other processes cannot be told."""


def follow(modules: Mapping[str, nn.Module], changes: Iterable[Change]) -> None:
    """Make the changes of the first process in this one."""
    for path, keys, elements, kept, removed in changes:
        container: Any = vars(modules[path])
        with suppress(
            LookupError, TypeError
        ):  # it is in an object of which this process was not told
            for key in keys:
                container = container[key]
            if isinstance(container, dict):
                for key in removed:
                    container.pop(key, None)
                container.update(_received(elements, container))
            elif isinstance(container, list):
                container[kept:] = _received(elements, container[kept:])
            else:
                set_elements(container, _received(elements, list(container)))


def _containers_in(container: Any, keys: Keys = ()) -> Iterator[_Container]:
    if not isinstance(container, tuple):
        yield _Container.at(keys, container)
    if len(keys) < _DEPTH and not (keys and len(container) > _LONG):
        for key, value in _items(container):
            if isinstance(value, _CONTAINERS) and (keys or key not in _INTERNAL):
                yield from _containers_in(value, (*keys, key))


def _items(container: Any) -> Iterable[tuple[Any, Any]]:
    """Return the keys of a container with its elements; nothing of a set."""
    if isinstance(container, set):
        return ()
    return container.items() if isinstance(container, dict) else enumerate(container)


def _copied(container: Any) -> Any:
    basic = next((kind for kind in (dict, set) if isinstance(container, kind)), list)
    return basic(container)


def _told(value: Any) -> Any:
    """Return a value as other processes are told of it; raise _NotTold if they cannot be."""
    if type(value) is Tensor:
        if value.is_meta or value.is_quantized or value.layout is not torch.strided:
            raise _NotTold
        value = value.detach()
        if value.nbytes <= _SMALL:
            return value
        return LargeTensor(tuple(value.shape), value.dtype, int(checksum(value)))
    if type(value) is dict and all(isinstance(key, _ATOMS) for key in value):
        return {key: _told(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_told, value))
    if type(value) is deque:
        return deque(map(_told, value), value.maxlen)
    if type(value) is set and all(isinstance(each, _ATOMS) for each in value):
        return value
    is_array = isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject
    if type(value) in _ATOMS or (is_array and value.nbytes <= _SMALL_ARRAY):
        return value
    raise _NotTold


def _received(value: Any, own: Any) -> Any:
    """Return a value that was told, where this process has its ``own``."""
    if isinstance(value, LargeTensor):
        hollow = torch.empty(tuple(value.shape), dtype=value.dtype, device="meta")
        alike = type(own) is Tensor and own.shape == hollow.shape and own.dtype == hollow.dtype
        equal = alike and not own.is_meta and int(checksum(own)) == value.checksum
        return own if equal else hollow
    if type(value) is dict:
        there = own if isinstance(own, dict) else {}
        return {key: _received(each, there.get(key)) for key, each in value.items()}
    if type(value) in (list, tuple, deque):
        others = list(own) if type(own) in (list, tuple, deque) else []
        others += [None] * (len(value) - len(others))
        elements = map(_received, value, others)
        return deque(elements, value.maxlen) if type(value) is deque else type(value)(elements)
    return value
