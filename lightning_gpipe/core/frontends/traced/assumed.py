"""What a graph was traced with, and must still hold when its program runs.

Numbers, flags and tensors in attributes of the modules that were traced through are constants of
the graph, and so are their children and the hooks that they do not have. A change of one needs a
new graph, as the plain module would do something else from then on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor, nn

from lightning_gpipe.core.frontends.traced.tracer import hooks_of, is_layer
from lightning_gpipe.core.plan import CONTAINERS, contents, holders


def traced_through(root: nn.Module, layers: Collection[nn.Module]) -> Iterator[nn.Module]:
    """The modules whose forward is traced, or that hold such modules.

    Args:
        root: The outermost.
        layers: The modules that are kept whole besides those that :func:`is_layer` says.
    """
    yield root
    for child in root.children():
        if child not in layers and not is_layer(child):
            yield from traced_through(child, layers)


class Assumed:
    """The attributes of modules that were traced through, as they were then.

    Args:
        root: The outermost of them.
        layers: The modules that were kept whole.
    """

    def __init__(self, root: nn.Module, layers: Collection[nn.Module]) -> None:
        self.modules = list(dict.fromkeys(traced_through(root, layers)))
        found = [(holder.slots, holder.held) for holder in holders(self.modules)]
        found += [(vars(m), {"forward": vars(m).get("forward")}) for m in self.modules[1:]]
        self._slots = [(slots, k, v) for slots, held in found for k, v in held.items()]
        containers = [value for _, _, value in self._slots if isinstance(value, CONTAINERS)]
        containers += [module._parameters for module in self.modules]
        self._contents = [(each, tuple(contents(each))) for each in containers]
        self._children = [(each._modules, list(each._modules.values())) for each in self.modules]
        self._hooks = [each for module in self.modules[1:] for each in hooks_of(module)]
        tensors = [value for _, _, value in self._slots if isinstance(value, Tensor)]
        self._versions = [(each, each._version) for each in tensors if not each.is_inference()]

    def holds(self) -> bool:
        """Whether nothing has changed; written for speed, without generators."""
        for slots, name, value in self._slots:
            if slots.get(name) is not value:
                return False
        for container, before in self._contents:
            if not _same(container, before):
                return False
        for tensor, version in self._versions:
            if tensor._version != version:
                return False
        for children, held in self._children:
            if [*children.values()] != held:
                return False
        return not any(self._hooks)


def _same(container: Any, before: tuple[Any, ...]) -> bool:
    now = contents(container)
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))
