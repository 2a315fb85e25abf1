"""Searches objects for tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

PLAIN = (Tensor, bool, int, float, complex, str, bytes, type(None))  # these hold no other tensor


def attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes in an object's ``__dict__`` and ``__slots__``."""
    if isinstance(value, type | ModuleType | FunctionType | nn.Module):
        return
    yield from getattr(value, "__dict__", {}).items()
    for name in slot_names(type(value)):
        if hasattr(value, name):
            yield name, getattr(value, name)


def slot_names(kind: type) -> Iterator[str]:
    """Yield the names in the ``__slots__`` of a class and its bases."""
    for cls in kind.__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__"):
                yield name


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


def refuse_hidden(leaf: Any) -> None:
    """Raise for a leaf of a pytree that holds tensors, which would not be split nor detached."""
    kind = type(leaf).__qualname__
    if isinstance(leaf, PackedSequence):
        raise TypeError(
            "a PackedSequence has no row per sample and cannot pass through a pipeline: pass the "
            "padded tensor and the lengths, and pack them in the layer that needs it."
        )
    if isinstance(leaf, Collection) and holds_tensor(leaf):
        raise TypeError(
            "tensors that pass through a pipeline must be in plain tuples, lists, dicts or "
            f"dataclasses: got a {kind} that holds one. Convert it with dict(...), list(...) or "
            "tuple(...), or register the class with torch.utils._pytree.register_pytree_node."
        )
    name = next((name for name, value in attributes(leaf) if holds_tensor(value)), None)
    if name is not None:
        raise TypeError(
            "tensors that pass through a pipeline must be in tuples, lists, dicts or "
            f"dataclasses: got a {kind} with one in its attribute {name!r}. Pass the tensors "
            f"themselves and construct the {kind} where it is used, or register the class with "
            "torch.utils._pytree.register_pytree_node."
        )
