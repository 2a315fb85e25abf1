"""Searches objects for tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

PLAIN = (Tensor, bool, int, float, complex, str, bytes, type(None))  # these hold no other tensor


def attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes in an object's ``__dict__`` and ``__slots__``."""
    if isinstance(value, type | ModuleType | FunctionType | nn.Module):
        return
    yield from getattr(value, "__dict__", {}).items()
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name) and not name.startswith("__"):
                yield name, getattr(value, name)


def holds_tensor(value: Any, depth: int = 4, kind: type = Tensor) -> bool:
    """Return whether a ``kind`` can be reached from ``value`` in ``depth`` steps."""
    if isinstance(value, kind):
        return True
    if depth == 0 or isinstance(value, PLAIN):
        return False
    inner = [attribute for _, attribute in attributes(value)]
    if isinstance(value, Mapping):
        inner += value.values()
    elif isinstance(value, list | tuple | set | frozenset | deque):
        inner += value
    return any(holds_tensor(x, depth - 1, kind) for x in inner)


def requires_grad(leaf: object) -> bool:
    """Return whether a leaf of a pytree is a tensor that requires a gradient."""
    return isinstance(leaf, Tensor) and leaf.requires_grad
