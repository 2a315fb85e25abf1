"""The plain attributes of modules, which ``nn.Module`` does not register.

A counter, a cache or a generator is on no device and in no state dict, but layers change it in
forward all the same. The attributes of an object of a user's class that a module has count as well.
"""

from __future__ import annotations

import math
import random
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from copy import copy
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple
from weakref import ProxyTypes

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_gpipe.core.data import attributes, slot_names

Slot = tuple[nn.Module, str]  # of a parameter, buffer or attribute: the module, and its name there

CONTAINERS = (list, dict, set, deque)

# The attributes of nn.Module itself. Besides, a deferred batch norm has another forward while it
# runs, and a block of a pipelined nn.ModuleList another _call_impl.
_INTERNAL = frozenset({*vars(nn.Module()), "forward", "_call_impl"})
_FUNCTIONS = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, partial)
# Not even loggers and configurations are searched: reading them fills caches in their attributes.
_LIBRARIES = (
    "builtins",
    "lightning",
    "lightning_gpipe",
    "logging",
    "numpy",
    "omegaconf",
    "pathlib",
    "random",
    "torch",
)
# These hold nothing, and there may be a vocabulary of them. A proxy's object may be deleted.
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, *ProxyTypes})
_LARGE = 64  # elements of a container in which no objects are looked for


class Holder(NamedTuple):
    """A module with attributes, or an object or parameter in it."""

    module: nn.Module
    prefix: str  # of the attributes' names: "meter." for an object, empty for a module
    slots: MutableMapping[str, Any]  # all attributes, including those of nn.Module itself

    @property
    def held(self) -> Mapping[str, Any]:
        """The attributes that a class or a user set, by name."""
        if self.prefix:
            return self.slots
        held = dict(self.slots)  # another thread may set one meanwhile
        for name in _INTERNAL:
            held.pop(name, None)
        return held

    def slot(self, name: str) -> Slot:
        return self.module, self.prefix + name


class _Attributes(MutableMapping[str, Any]):
    """The attributes of an object with ``__slots__``, as those of others are in its dict."""

    def __init__(self, owner: object) -> None:
        self._owner = owner

    @override
    def __getitem__(self, name: str) -> Any:
        return dict(attributes(self._owner))[name]

    @override
    def __setitem__(self, name: str, value: Any) -> None:
        object.__setattr__(self._owner, name, value)  # also of a frozen dataclass

    @override
    def __delitem__(self, name: str) -> None:
        object.__delattr__(self._owner, name)

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(dict(attributes(self._owner)))

    @override
    def __len__(self) -> int:
        return len(dict(attributes(self._owner)))


def holders(modules: Iterable[nn.Module], *, deep: bool = False) -> Iterator[Holder]:
    """Yield each module, and each object of a user's class in an attribute of one.

    Also those in its containers, but for large ones, in which there may be a data set. ``deep``:
    also the objects in these objects, and objects with ``__slots__``.
    """
    seen: set[int] = set()
    for module in modules:
        found = [Holder(module, "", vars(module))]
        for holder in found:  # which grows
            yield holder
            if holder.prefix and not deep:
                continue
            for name, value in holder.held.items():
                for number, each in enumerate(user_objects(value, slotted=deep)):
                    if id(each) not in seen:
                        seen.add(id(each))
                        path = name if each is value else f"{name}[{number}]"
                        slots = _Attributes(each) if _is_slotted(each) else vars(each)
                        found.append(Holder(module, f"{holder.prefix}{path}.", slots))


def user_objects(value: Any, *, slotted: bool = False) -> list[Any]:
    """Return the objects of users' classes that an attribute with this value holds."""
    if type(value) in _ATOMS:
        return []
    pieces = within(value, largest=_LARGE)
    return [each for each in pieces if is_user_object(each, slotted=slotted)]


def parameter_holders(modules: Iterable[nn.Module]) -> Iterator[Holder]:
    """Yield each parameter with attributes, such as the scales of a quantised weight."""
    seen: set[int] = set()
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None and vars(parameter) and id(parameter) not in seen:
                seen.add(id(parameter))
                yield Holder(module, f"{name}.", vars(parameter))


def attributes_in(layer: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the plain attributes of a module, its submodules and their objects, by full name."""
    for path, module in layer.named_modules():
        for holder in holders([module]):
            for name, value in holder.held.items():
                yield f"{path}{'.' * bool(path)}{holder.prefix}{name}", value


def within(value: Any, *, largest: float = math.inf) -> Iterator[Any]:
    """Yield ``value`` and, if it is a container or a tuple, everything in it, each object once.

    Numbers and strings are left out, and the elements of containers with more than ``largest``.
    """
    seen: set[int] = set()
    stack = [] if type(value) in _ATOMS else [value]
    while stack:
        item = stack.pop()
        if id(item) not in seen:
            seen.add(id(item))
            yield item
            elements = contents(item)
            if len(elements) <= largest:
                stack += [x for x in elements if type(x) not in _ATOMS]


def contents(value: Any) -> Collection[Any]:
    """Return the elements of a container or tuple, or the values of a dict; else nothing."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, (tuple, *CONTAINERS)) else ()


def tensors_within(value: Any, depth: int = 8) -> Iterator[Tensor]:
    """Yield the tensors within an object, its attributes and its containers."""
    for item in within(value):
        if isinstance(item, Tensor):
            yield item
        elif depth and not isinstance(item, (type, nn.Module)):
            for attribute in getattr(item, "__dict__", {}).values():
                yield from tensors_within(attribute, depth - 1)


def with_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return ``value`` with changed tensors, in copies of the objects that hold some."""
    copies: dict[int, Any] = {}

    def changed(item: Any) -> Any:
        key = id(item)
        if key in copies:
            return copies[key]
        if isinstance(item, Tensor):
            copies[key] = change(item)
        elif next(tensors_within(item), None) is None:
            copies[key] = item
        elif isinstance(item, tuple):
            values = map(changed, item)
            copies[key] = item._make(values) if hasattr(item, "_make") else type(item)(values)
        else:
            copies[key] = made = copy(item)  # before its contents, which may lead back to it
            if isinstance(item, (list, deque)):
                made.clear()
                made.extend(map(changed, item))
            elif isinstance(item, set):
                made.clear()
                made.update(map(changed, item))
            else:
                slots = made if isinstance(item, dict) else vars(made)
                slots.update({name: changed(x) for name, x in slots.items()})
        return copies[key]

    return changed(value)


def is_generator(value: Any) -> bool:
    """Return whether ``value`` is a random generator of PyTorch, NumPy or Python."""
    numpy = sys.modules.get("numpy.random")
    others = () if numpy is None else (numpy.Generator, numpy.RandomState)
    return isinstance(value, (torch.Generator, random.Random, *others))


def is_user_object(value: Any, *, slotted: bool = False) -> bool:
    """Return whether ``value`` is an object of a user's class, with a dict of attributes.

    ``slotted``: or with ``__slots__``.
    """
    if type(value).__module__.partition(".")[0] in _LIBRARIES or type(value) in _ATOMS:
        return False
    if isinstance(value, (nn.Module, Tensor, *_FUNCTIONS, *CONTAINERS)):
        return False
    has_dict = isinstance(getattr(value, "__dict__", None), dict)
    return has_dict or (slotted and _is_slotted(value))


def _is_slotted(value: Any) -> bool:
    return any(True for _ in slot_names(type(value)))
