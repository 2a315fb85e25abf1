"""Lets an nn.Sequential run as a pipeline without ceasing to be that nn.Sequential.

To wrap the module in another one would change the names in its state dict, to replace it would lose
its class, its hooks and its other methods, and to hang the pipeline's threads on it would end
``copy.deepcopy(model)`` and ``torch.save(model)``. So the object stays, and only what it runs
changes: an instance attribute ``forward``, which a copy does not take along.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def install(module: nn.Module, run: Callable[[Any], Any]) -> None:
    """Let ``module`` run ``run`` in the place of its forward, until :func:`remove`."""
    module.forward = _Installed(module, run)


def remove(module: nn.Module) -> None:
    """Let ``module`` run its own forward again."""
    module.__dict__.pop("forward", None)


class _Installed:
    """The forward of a module that runs as a pipeline."""

    def __init__(self, module: nn.Module, run: Callable[[Any], Any]) -> None:
        self._module = module
        self._run = run

    def __call__(self, input: Any) -> Any:
        return self._run(input)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the module, pickled or deep, runs as the plain module that it is a copy of. When
        # this is called, the copy has no attributes yet, so it is its class that has a forward.
        return getattr, (self._module, "forward")
