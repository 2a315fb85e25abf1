"""Records which numbers of modules are read while they run.

The blocks of a model often differ in one number, such as ``layer_idx``, that their forwards do not
read: it is for a cache, or for messages. A run that did not read a number would have been the same
with any other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

Number = tuple[int, str]  # the index of a module, and the name of its attribute

_NOT_THE_USERS = ("torch", "lightning_gpipe")  # packages that read attributes to save or to show


def is_number(module: nn.Module, value: Any) -> bool:
    """Return whether an attribute is a number of a user's module."""
    return type(value) is int and not _is_ours(type(module).__module__)


def numbers_of(modules: Iterable[nn.Module]) -> dict[Number, int]:
    """Return the numbers that modules have as attributes."""
    return {
        (k, name): value
        for k, module in enumerate(modules)
        for name, value in vars(module).items()
        if is_number(module, value)
    }


@contextmanager
def recording(modules: Iterable[nn.Module]) -> Iterator[set[Number]]:
    """Collect the numbers of modules that are read in a ``with`` block.

    A read of ``__dict__`` reads all numbers of the module.
    """
    numbers_read: set[Number] = set()
    listed = list(modules)
    names: dict[int, dict[str, list[Number]]] = {}
    for k, name in numbers_of(listed):
        own = names.setdefault(id(listed[k]), {})
        for attribute in (name, "__dict__"):
            own.setdefault(attribute, []).append((k, name))
    with ExitStack() as stack:
        for kind in dict.fromkeys(type(module) for module in listed if id(module) in names):
            stack.enter_context(_watched(kind, names, numbers_read))
        yield numbers_read


@contextmanager
def _watched(
    kind: type[nn.Module],
    names: Mapping[int, Mapping[str, list[Number]]],
    numbers_read: set[Number],
) -> Iterator[None]:
    """Record the numbers of modules of a class that are read."""
    before = vars(kind).get("__getattribute__")
    read: Callable[[Any, str], Any] = kind.__getattribute__

    def recorded(self: Any, name: str) -> Any:
        numbers = names.get(id(self), {}).get(name)
        if numbers and not (name == "__dict__" and _is_ours(sys._getframe(1).f_globals)):
            numbers_read.update(numbers)
        return read(self, name)

    kind.__getattribute__ = recorded  # type: ignore[method-assign]  # it is undone
    try:
        yield
    finally:
        if before is None:
            del kind.__getattribute__
        else:
            kind.__getattribute__ = before  # type: ignore[method-assign]  # what was there


def _is_ours(module: str | Mapping[str, Any]) -> bool:
    """Return whether a Python module, by its name or variables, is not the user's."""
    name = module if isinstance(module, str) else module.get("__name__", "")
    return name.partition(".")[0] in _NOT_THE_USERS
