"""Which parameters took part in a mini-batch.

Autograd calls a hook on a parameter only if the parameter has a gradient. The pipeline's node has
all parameters as inputs, so hooks on parameters that no layer used would be called with None. So if
any parameter has a hook, the graphs of all micro-batches are searched for shadows; otherwise the
search is skipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_gpipe.core.faithful import Shadows, has_hooks


class Participation:
    """The parameters that will have a gradient after one mini-batch.

    Args:
        shadows: The shadows of each stage.
    """

    def __init__(self, shadows: Sequence[Shadows]) -> None:
        self._shadows = shadows
        self._searches = any(has_hooks(p) for each in shadows for p in each.parameters)
        self._used: set[int] = set()

    def record(self, outputs: Iterable[Any]) -> None:
        """Search the graphs of a stage's outputs; called by workers, from their threads."""
        if self._searches:
            self._used.update(_leaves_behind(outputs))

    def parameters(self) -> list[nn.Parameter]:
        """The parameters, each once."""
        found: dict[int, nn.Parameter] = {}
        for shadows in self._shadows:
            for parameter in shadows.parameters:
                if not self._searches or id(shadows.shadow_of(parameter)) in self._used:
                    found[id(parameter)] = parameter
        return list(found.values())


def _leaves_behind(outputs: Iterable[Any]) -> set[int]:
    """The ids of the leaves that backward would reach from ``outputs``."""
    waiting = [x.grad_fn for x in outputs if isinstance(x, Tensor) and x.grad_fn is not None]
    seen = set(waiting)
    found = set()
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        new = {after for after, _ in node.next_functions if after is not None} - seen
        seen |= new
        waiting += new
    return found
