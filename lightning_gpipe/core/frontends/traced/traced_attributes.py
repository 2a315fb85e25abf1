"""The attributes of modules: those that a trace changes, and those that its graph depends on.

Symbolic values that a trace assigns to attributes, or appends, are removed, and the forward is
refused: a pipeline would not do it again. Numbers, flags, tensors, children and missing hooks of
modules that were traced through are constants of the graph, as are attributes that the forward
reads of other modules, such as ``self.dropout.p``: a change of one needs a new graph.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from operator import is_

from torch import Tensor, nn

from lightning_gpipe.core.faithful import SavedContainer, set_elements
from lightning_gpipe.core.frontends.traced.tracer import is_layer
from lightning_gpipe.core.frontends.traced.watching import Reads
from lightning_gpipe.core.layout import CONTAINERS, contents, holders, hooks_of


class ModuleSnapshot:
    """The attributes of a module, of all modules in it, and of the objects that they hold."""

    def __init__(self, root: nn.Module) -> None:
        self._slots = [(holder, dict(holder.slots)) for holder in holders(root.modules())]
        self._contents = [
            (holder, name, SavedContainer.of(value))
            for holder, slots in self._slots
            for name, value in slots.items()
            if isinstance(value, CONTAINERS)
        ]

    def restore(self) -> dict[nn.Module, list[str]]:
        changed: dict[nn.Module, list[str]] = defaultdict(list)
        for holder, name, saved in self._contents:
            if saved.moved:
                set_elements(saved.container, saved.copy)
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
        attributes = [(holder.slots, holder.held) for holder in holders(self.modules)]
        attributes += [(vars(m), {"forward": vars(m).get("forward")}) for m in inner]
        self._slots = [(slots, k, v) for slots, values in attributes for k, v in values.items()]
        containers = [value for _, _, value in self._slots if isinstance(value, CONTAINERS)]
        containers += [hooks for m in inner for hooks in hooks_of(m)]
        containers += [slots for m in self.modules for slots in (m._parameters, m._modules)]
        views = map(contents, containers)
        self._contents = [(view, tuple(view)) for view in views]
        tensors = [value for _, _, value in self._slots if isinstance(value, Tensor)]
        self._reads = reads
        self._versions = [(x, x._version) for x in tensors if not x.is_inference()]

    def holds(self) -> bool:
        """Return whether nothing has changed; each mini-batch asks."""
        for slots, name, value in self._slots:
            if slots.get(name) is not value:
                return False
        for view, before in self._contents:
            if len(view) != len(before) or not all(map(is_, view, before)):
                return False
        if any(getattr(of, name, of) != value for (of, name), value in self._reads.items()):
            return False
        return all(tensor._version == version for tensor, version in self._versions)


def _traced_through(root: nn.Module, whole: Collection[nn.Module]) -> Iterator[nn.Module]:
    yield root
    for child in root.children():
        if child not in whole and not is_layer(child):
            yield from _traced_through(child, whole)
