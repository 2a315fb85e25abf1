"""What modules hold in plain attributes, which ``nn.Module`` does not know of.

A counter, a cache, a list that grows, a generator: they are neither parameters nor buffers, so they
are on no device and in no state dict, but layers change them in forward all the same. An object of
a user's class that a module holds, such as a meter, is looked into as well.
"""

from __future__ import annotations

import math
import random
import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple
from weakref import ProxyTypes

import torch
from torch import Tensor, nn

CONTAINERS = (list, dict, set, deque)

# The slots of nn.Module itself. A deferred batch norm, for one, has another forward while it runs,
# and a block of an nn.ModuleList that runs as a pipeline has another _call_impl.
_INTERNAL = frozenset({*vars(nn.Module()), "forward", "_call_impl"})
_FUNCTIONS = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, partial)
# Loggers and configurations too: reading them fills caches in their attributes.
_LIBRARIES = ("builtins", "lightning", "logging", "numpy", "omegaconf", "random", "torch")
# What holds nothing: there may be a vocabulary of them. A proxy may be that of a deleted object.
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, *ProxyTypes})


class Holder(NamedTuple):
    """A module, or an object or parameter that it holds, with attributes.

    Attributes:
        module: The module.
        prefix: What the names of its attributes begin with: ``"meter."`` for an object.
        slots: All attributes, those of ``nn.Module`` itself included.
    """

    module: nn.Module
    prefix: str
    slots: dict[str, Any]

    @property
    def held(self) -> dict[str, Any]:
        """The attributes that a class or a user set, by name."""
        if self.prefix:
            return self.slots
        return {name: value for name, value in self.slots.items() if name not in _INTERNAL}


def holders(modules: Iterable[nn.Module]) -> Iterator[Holder]:
    """Yield each module, and each object of a user's class that one holds."""
    seen: set[int] = set()
    for module in modules:
        itself = Holder(module, "", vars(module))
        yield itself
        for name, value in itself.held.items():
            if is_own(value) and id(value) not in seen:
                seen.add(id(value))
                yield Holder(module, f"{name}.", vars(value))


def parameter_holders(modules: Iterable[nn.Module]) -> Iterator[Holder]:
    """Yield each parameter with attributes, such as the scales of a quantised weight."""
    seen: set[int] = set()
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None and vars(parameter) and id(parameter) not in seen:
                seen.add(id(parameter))
                yield Holder(module, f"{name}.", vars(parameter))


def held_in(layer: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield what a module, the modules in it and their objects hold, with names in the module."""
    for path, module in layer.named_modules():
        for holder in holders([module]):
            for name, value in holder.held.items():
                yield f"{path}{'.' * bool(path)}{holder.prefix}{name}", value


def within(value: Any, *, largest: float = math.inf) -> Iterator[Any]:
    """Yield ``value`` and, if it is a container or a tuple, everything in it, each object once.

    Numbers and strings are left out.

    Args:
        value: The object.
        largest: The most elements of containers and tuples to look into.
    """
    seen: set[int] = set()
    waiting = [] if type(value) in _ATOMS else [value]
    while waiting:
        found = waiting.pop()
        if id(found) not in seen:
            seen.add(id(found))
            yield found
            elements = contents(found)
            if len(elements) <= largest:
                waiting += [each for each in elements if type(each) not in _ATOMS]


def contents(value: Any) -> Collection[Any]:
    """The elements of a container or a tuple, the values of a dict; nothing of anything else."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, (tuple, *CONTAINERS)) else ()


def is_generator(value: Any) -> bool:
    """Whether it is a generator of random numbers, of PyTorch, NumPy or Python."""
    numpy = sys.modules.get("numpy.random")
    others = () if numpy is None else (numpy.Generator, numpy.RandomState)
    return isinstance(value, (torch.Generator, random.Random, *others))


def is_own(value: Any) -> bool:
    """Whether it is an object of a user's class, with attributes."""
    library = type(value).__module__.partition(".")[0] in _LIBRARIES
    if (
        library
        or type(value) in _ATOMS
        or isinstance(value, (nn.Module, Tensor, *_FUNCTIONS, *CONTAINERS))
    ):
        return False
    return isinstance(getattr(value, "__dict__", None), dict)
