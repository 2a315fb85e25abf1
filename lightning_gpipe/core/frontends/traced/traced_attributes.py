"""The attributes of modules: those that a trace changes, and those that its graph depends on.

Symbolic values that a trace assigns to attributes, or appends, are removed, and the forward is
refused: a pipeline would not do it again. Numbers, flags, arrays, objects, children and missing
hooks of modules that were traced through are constants of the graph, as are attributes that the
forward reads of other modules, such as ``self.dropout.p``, and what it computes of tensors that are
attributes: a change of one needs a new graph.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from operator import is_
from typing import Any

from torch import nn

from lightning_gpipe.core.faithful import SavedArray, SavedContainer, saved_within
from lightning_gpipe.core.frontends.traced.tracer import is_layer
from lightning_gpipe.core.frontends.traced.watching import Reads
from lightning_gpipe.core.layout import contents, holders, hooks_of


class ModuleSnapshot:
    """The attributes of a module, of all modules in it, and of the objects that they hold."""

    def __init__(self, root: nn.Module) -> None:
        of_all = holders(root.modules(), deep=True)
        self._slots = [(holder, dict(holder.slots)) for holder in of_all]
        self._contents = [
            (holder, name, saved)
            for holder, slots in self._slots
            for name, value in slots.items()
            for saved in saved_within(value)
        ]

    def restore(self) -> dict[nn.Module, list[str]]:
        changed: dict[nn.Module, list[str]] = defaultdict(list)
        for holder, name, saved in self._contents:
            if saved.moved:
                saved.restore()
                changed[holder.module].append(holder.prefix + name)
        for holder, former in self._slots:
            slots = holder.slots
            names = dict.fromkeys([*former, *slots])
            others = [
                name for name in names if slots.get(name, slots) is not former.get(name, slots)
            ]
            if others:
                slots.clear()
                slots.update(former)
                changed[holder.module] += [holder.prefix + name for name in others]
        return changed


class AssumedAttributes:
    """The attributes of modules that were traced through, or hold such modules, as they were."""

    def __init__(self, root: nn.Module, whole: Collection[nn.Module], reads: Reads) -> None:
        self.modules = list(dict.fromkeys(_traced_through(root, whole)))
        inner = self.modules[1:]
        attributes = [(holder.slots, holder.held) for holder in holders(self.modules, deep=True)]
        attributes += [(vars(m), {"forward": vars(m).get("forward")}) for m in inner]
        self._slots = [(slots, k, v) for slots, values in attributes for k, v in values.items()]
        saved = (each for _, _, value in self._slots for each in saved_within(value))
        unique = {id(each[0]): each for each in saved}.values()
        self._arrays = [each for each in unique if isinstance(each, SavedArray)]
        containers = [each.container for each in unique if isinstance(each, SavedContainer)]
        views: list[Collection[Any]] = [x.keys() for x in containers if isinstance(x, dict)]
        containers += [hooks for m in inner for hooks in hooks_of(m)]
        containers += [slots for m in self.modules for slots in (m._parameters, m._modules)]
        views += map(contents, containers)
        self._contents = [(view, tuple(view)) for view in views]
        self._reads = reads

    def holds(self) -> bool:
        """Return whether nothing has changed; each mini-batch asks."""
        for slots, name, value in self._slots:
            if slots.get(name) is not value:
                return False
        for view, before in self._contents:
            if len(view) != len(before) or not all(map(is_, view, before)):
                return False
        if any(array.moved for array in self._arrays):
            return False
        return all(getattr(of, name, of) == value for (of, name), value in self._reads.items())


def _traced_through(root: nn.Module, whole: Collection[nn.Module]) -> Iterator[nn.Module]:
    yield root
    for child in root.children():
        if child not in whole and not is_layer(child):
            yield from _traced_through(child, whole)
