"""The attributes of modules before their forward is traced, to find and undo its changes.

A traced forward runs once, on values that are not tensors, so the attributes that it assigns and
the items that it appends are not those of a real run. They are undone; and since a pipeline would
not do it again, the forward of that module cannot be traced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from torch import nn

from lightning_gpipe.core.layout import CONTAINERS, contents, holders


class ModuleSnapshot:
    """The attributes of a module, of all modules in it, and of the objects that they hold."""

    def __init__(self, root: nn.Module) -> None:
        self._slots = [
            (holder.module, holder.prefix, holder.slots, dict(holder.slots))
            for holder in holders(root.modules())
        ]
        self._contents = [
            (module, f"{prefix}{name}", value, _elements(value))
            for module, prefix, _, slots in self._slots
            for name, value in slots.items()
            if isinstance(value, CONTAINERS)
        ]

    def restore(self) -> dict[nn.Module, list[str]]:
        """Undo all changes, and return the names of the attributes that had any, by module."""
        changed: dict[nn.Module, list[str]] = {}
        for module, name in [*self._restored_contents(), *self._restored_slots()]:
            changed.setdefault(module, []).append(name)
        return changed

    def _restored_slots(self) -> Iterator[tuple[nn.Module, str]]:
        for module, prefix, slots, before in self._slots:
            names = [
                name
                for name in dict.fromkeys([*before, *slots])
                if slots.get(name, slots) is not before.get(name, slots)
            ]
            if names:
                slots.clear()
                slots.update(before)
            yield from ((module, f"{prefix}{name}") for name in names)

    def _restored_contents(self) -> Iterator[tuple[nn.Module, str]]:
        for module, name, container, before in self._contents:
            now = _elements(container)
            if len(now) == len(before) and all(map(_same, now, before)):
                continue
            container.clear()
            if isinstance(container, list | deque):
                container.extend(before)
            else:
                container.update(before)
            yield module, name


def _elements(container: Any) -> list[Any]:
    return list(container.items() if isinstance(container, dict) else contents(container))


def _same(one: Any, other: Any) -> bool:
    if type(one) is tuple and type(other) is tuple and len(one) == len(other):  # items of a dict
        return all(a is b for a, b in zip(one, other, strict=True))
    return one is other
