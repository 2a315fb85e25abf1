"""Makes an nn.Sequential run as a pipeline while it stays the same object.

To wrap the module would change the keys of its state dict, to replace it would lose its class, its
hooks and its other methods, and to store the pipeline's threads in it would break
``copy.deepcopy(model)`` and ``torch.save(model)``. So the object stays, and gets an instance
attribute ``forward``, which is not copied with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def install(module: nn.Module, run: Callable[[Any], Any]) -> None:
    """Make ``module`` call ``run`` instead of its forward, until :func:`remove`."""
    module.forward = _Installed(module, run)


def remove(module: nn.Module) -> None:
    """Make ``module`` run its own forward again."""
    module.__dict__.pop("forward", None)


class _Installed:
    """The forward of a module that runs as a pipeline."""

    def __init__(self, module: nn.Module, run: Callable[[Any], Any]) -> None:
        self._module = module
        self._run = run

    def __call__(self, input: Any) -> Any:
        return self._run(input)

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickled or deep copy of the module runs as the plain module. When this getattr runs, the
        # copy has no instance attributes yet, so it returns the forward of the class.
        return getattr, (self._module, "forward")
