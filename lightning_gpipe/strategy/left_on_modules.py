"""Values that a step leaves in attributes of modules, for processes that did not run all of it.

Lightning's hooks run in all processes and read there what steps have left: a count, or the losses
of an epoch in a list. So the first process tells the others what a step has assigned or edited, in
containers too. Of a large tensor it tells the shape: others keep theirs if it is equal, and else
have one on ``meta``, whose mean can be logged. Of a generator it tells the state. Objects of other
classes are not told.
"""

from __future__ import annotations

import pickle
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from operator import is_
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn

from lightning_gpipe.core.data import checksum
from lightning_gpipe.core.faithful import ForeignGenerator, SavedContainer, set_elements
from lightning_gpipe.core.layout import CONTAINERS

_SMALL = 2**16  # bytes of a tensor that is told as it is
_SMALL_ARRAY = 2**20  # the same of a NumPy array, which can be nothing else
_LONG = 1024  # elements of a container of which only the number is looked at
_DEPTH = 4  # of containers in one another
_UNSET = object()
_UNKNOWN = object()
_GENERATORS = torch.Generator, random.Random, np.random.Generator, np.random.RandomState
_MARKED = frozenset((Tensor, np.ndarray, tuple, *_GENERATORS))
_INTERNAL = frozenset(vars(L.LightningModule()))
_NESTING = (*CONTAINERS, tuple)
_KINDS = dict, set, (list, deque)  # of which one cannot have the elements of another
_DICTS = dict, OrderedDict, Counter, defaultdict
_FACTORIES = None, list, dict, set, int, float  # of defaultdicts
_ATOMS = bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device

Keys = tuple[Any, ...]  # the way to a container from the attributes of a module


class LargeTensor(NamedTuple):
    """A tensor of which other processes are told the shape; one with its checksum is equal."""

    shape: Sequence[int]
    dtype: torch.dtype
    checksum: int


class Drawn(NamedTuple):
    """The state of a generator, which others give to theirs."""

    state: Any


class Change(NamedTuple):
    """A change of a container: the elements of a list after those that were ``kept``, or all.

    Of a dict, those that changed, and the keys of the ``removed`` ones; None if all were.
    """

    path: str
    keys: Keys
    elements: Any
    kept: int = 0
    removed: Sequence[Any] | None = ()


class LeftOnModules:
    """The contents of the attributes of modules, by their paths, before a step."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._containers = [
            (path, container)
            for path, module in modules.items()
            for container in _containers_in(vars(module))
        ]

    def changes(self) -> Iterator[Change]:
        """Yield the changes since; those of an inner container come before the outer one's."""
        for path, before in reversed(self._containers):
            with suppress(*_NOT_TOLD):
                yield from before.changes(path)


class _Container(NamedTuple):
    """A container before a step, and the marks of those of its elements that have edits."""

    keys: Keys
    saved: SavedContainer
    marks: Mapping[Any, Any]

    def changes(self, path: str) -> Iterator[Change]:
        now, size, before = self.saved
        edited = any(map(self._edited, self.marks))
        if not (edited or self.saved.moved):
            return
        if isinstance(now, dict) and before is not None:
            changed = {}
            for key, value in now.items():
                if before.get(key, _UNSET) is not value or self._edited(key):
                    with suppress(*_NOT_TOLD):
                        changed[_atom(key)] = _told(value)
            removed = [key for key in before if key not in now and _is_atom(key)]
            if changed or removed:
                yield Change(path, self.keys, changed, removed=removed)
        elif type(now) is list and len(now) > size and not edited and _begins_as(now, before):
            yield Change(path, self.keys, _told(now[size:]), kept=size)
        else:
            yield Change(path, self.keys, _told(SavedContainer.of(now).copy), removed=None)

    def _edited(self, key: Any) -> bool:
        mark = self.marks.get(key)
        if mark is _UNKNOWN:  # a list of outputs is not told anew in each step
            return isinstance(self.saved.container, dict)
        return mark is not None and _mark(self.saved.copy[key]) != mark


def _begins_as(now: list[Any], before: list[Any] | None) -> bool:
    return before is None or all(map(is_, now, before))


class _NotTold(Exception):
    """Raised of an object that other processes cannot be told."""


_NOT_TOLD = _NotTold, RecursionError  # of a container within itself


def follow(modules: Mapping[str, nn.Module], changes: Iterable[Change]) -> None:
    """Make the changes of the first process in this one."""
    for path, keys, elements, kept, removed in changes:
        container: Any = vars(modules[path])
        # It is not there in an object of which this process was not told.
        with suppress(LookupError, TypeError):
            for key in keys:
                container = container[key]
            if not any(isinstance(container, x) and isinstance(elements, x) for x in _KINDS):
                continue
            if isinstance(container, dict):
                values = _received(elements, container)
                for key in list(container) if removed is None else removed:
                    container.pop(key, None)
                for key, value in values.items():  # a Counter's update adds numbers
                    container[key] = value
            elif isinstance(container, list):
                container[kept:] = _received(elements, container[kept:])
            else:
                set_elements(container, _received(elements, list(container)))


def _containers_in(container: Any, keys: Keys = ()) -> Iterator[_Container]:
    items = _items(container, within=bool(keys))
    if not isinstance(container, tuple):
        marked = [(k, x) for k, x in items if type(x) in _MARKED]
        marks = {k: mark for k, x in marked if (mark := _mark(x)) is not None}
        copied = not keys or len(container) <= _LONG
        yield _Container(keys, SavedContainer.of(container, copied=copied), marks)
    if len(keys) < _DEPTH:
        for key, value in items:
            if isinstance(value, _NESTING) and _is_atom(key):
                yield from _containers_in(value, (*keys, key))


def _items(container: Any, *, within: bool) -> list[tuple[Any, Any]]:
    """Return the keys with the elements that may have edits: of attributes, those of the user."""
    if not within:  # of a thousand modules in each step
        return [(k, x) for k, x in container.items() if k not in _INTERNAL]
    if isinstance(container, set) or len(container) > _LONG:
        return []
    return list(container.items() if isinstance(container, dict) else enumerate(container))


def _mark(value: Any) -> Any:
    """Return what another value has after an edit in place; None of one that has no edits."""
    if type(value) is Tensor:
        return _UNKNOWN if value.is_inference() else value._version
    if type(value) is tuple:
        marks = tuple(map(_mark, value))
        return None if all(mark is None for mark in marks) else marks
    if type(value) in _GENERATORS:
        state = ForeignGenerator.of(value).get_state()
        # A pickled tensor has the address of its memory.
        return state.numpy().tobytes() if isinstance(state, Tensor) else pickle.dumps(state)
    return value.tobytes() if _is_small_array(value) else None


def _is_small_array(value: Any) -> bool:
    told = type(value) is np.ndarray and not value.dtype.hasobject
    return told and bool(value.nbytes <= _SMALL_ARRAY)


def _is_atom(value: Any) -> bool:
    """Return True for a value that is never edited, and may be a key, in other processes, too."""
    kind = type(value)
    if kind in (tuple, frozenset, torch.Size):
        return all(map(_is_atom, value))
    if isinstance(value, Enum):
        return "<locals>" not in kind.__qualname__  # where others would not find it
    return kind in _ATOMS or (isinstance(value, np.generic) and not value.dtype.hasobject)


def _atom(key: Any) -> Any:
    if not _is_atom(key):
        raise _NotTold
    return key


def _told(value: Any) -> Any:
    """Return a value as other processes are told of it; raise _NotTold if they cannot be."""
    if type(value) is Tensor:
        if value.is_meta or value.is_quantized or value.layout is not torch.strided:
            raise _NotTold
        value = value.detach()
        if value.nbytes <= _SMALL:
            return value
        return LargeTensor(tuple(value.shape), value.dtype, int(checksum(value)))
    if type(value) in _DICTS and getattr(value, "default_factory", None) in _FACTORIES:
        return _with_values(value, {_atom(key): _told(each) for key, each in value.items()})
    if type(value) in (list, tuple):
        return type(value)(map(_told, value))
    if type(value) is deque:
        return deque(map(_told, value), value.maxlen)
    if type(value) is set:
        return set(map(_atom, value))
    if type(value) in _GENERATORS:
        return Drawn(ForeignGenerator.of(value).get_state())
    return value if _is_small_array(value) else _atom(value)


def _with_values(kind: Any, values: dict[Any, Any]) -> Any:
    """Return a dict with these values that is otherwise like another one."""
    if type(kind) is defaultdict:
        return defaultdict(kind.default_factory, values)
    return type(kind)(values)


def _received(value: Any, own: Any) -> Any:
    """Return a value that was told, where this process has its ``own``."""
    if isinstance(value, LargeTensor):
        hollow = torch.empty(tuple(value.shape), dtype=value.dtype, device="meta")
        alike = type(own) is Tensor and own.shape == hollow.shape and own.dtype == hollow.dtype
        equal = alike and not own.is_meta and int(checksum(own)) == value.checksum
        return own if equal else hollow
    if isinstance(value, Drawn):
        if type(own) in _GENERATORS:
            ForeignGenerator.of(own).set_state(value.state)
        return own
    if type(value) in _DICTS:
        there = own if isinstance(own, dict) else {}
        received = {key: _received(each, there.get(key)) for key, each in value.items()}
        return _with_values(value, received)
    if type(value) in (list, tuple, deque):
        others = list(own) if type(own) in (list, tuple, deque) else []
        others += [None] * (len(value) - len(others))
        elements = map(_received, value, others)
        return deque(elements, value.maxlen) if type(value) is deque else type(value)(elements)
    return value
