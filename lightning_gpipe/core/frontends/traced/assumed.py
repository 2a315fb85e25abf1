"""The attributes that a graph was traced with, which must be the same when its program runs.

Numbers, flags and tensors in attributes of the modules that were traced through are constants of
the graph, and so are their children and the hooks that they do not have. A change of one needs a
new graph, as the plain module would compute something else from then on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from operator import is_
from typing import Any

from torch import Tensor, nn

from lightning_gpipe.core.frontends.traced.tracer import is_layer
from lightning_gpipe.core.layout import CONTAINERS, contents, holders, hooks_of


class Assumed:
    """The attributes of modules that were traced through, as they were then.

    Attributes:
        modules: The modules that were traced through, or hold such modules.
    """

    def __init__(self, root: nn.Module, whole: Collection[nn.Module]) -> None:
        self.modules = list(dict.fromkeys(_traced_through(root, whole)))
        inner = self.modules[1:]
        attributes = [(holder.slots, holder.held) for holder in holders(self.modules)]
        attributes += [(vars(m), {"forward": vars(m).get("forward")}) for m in inner]
        self._slots = [(slots, k, v) for slots, values in attributes for k, v in values.items()]
        containers = [value for _, _, value in self._slots if isinstance(value, CONTAINERS)]
        self._contents = [(container, tuple(contents(container))) for container in containers]
        dicts: list[dict[Any, Any]] = [hooks for m in inner for hooks in hooks_of(m)]
        for module in self.modules:
            dicts += [module._parameters, module._modules]
        self._views = [(slots.values(), tuple(slots.values())) for slots in dicts]
        tensors = [value for _, _, value in self._slots if isinstance(value, Tensor)]
        self._versions = [(x, x._version) for x in tensors if not x.is_inference()]

    def holds(self) -> bool:
        """Return whether nothing has changed; each mini-batch asks."""
        for slots, name, value in self._slots:
            if slots.get(name) is not value:
                return False
        for values, before in self._views:
            if len(values) != len(before) or not all(map(is_, values, before)):
                return False
        for container, before in self._contents:
            now = contents(container)
            if len(now) != len(before) or not all(map(is_, now, before)):
                return False
        return all(tensor._version == version for tensor, version in self._versions)


def _traced_through(root: nn.Module, whole: Collection[nn.Module]) -> Iterator[nn.Module]:
    yield root
    for child in root.children():
        if child not in whole and not is_layer(child):
            yield from _traced_through(child, whole)
