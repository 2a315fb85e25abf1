"""The front-end for each type of module; an nn.Sequential needs none."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from lightning_gpipe.core.frontends.interface import Frontend
from lightning_gpipe.core.frontends.module_list import Loop
from lightning_gpipe.core.frontends.traced import Traced


def _looped(root: nn.Module, path: str, module: nn.Module) -> Frontend:
    return Loop(root, path)


# The model, the path of the module in it, and the module. The first type that fits is taken.
_KINDS: tuple[tuple[type[nn.Module], Callable[[nn.Module, str, nn.Module], Frontend]], ...] = (
    (nn.ModuleList, _looped),
    (nn.Module, Traced),
)


def frontend_of(root: nn.Module, path: str, module: nn.Module) -> Frontend:
    """The front-end for a module.

    Args:
        root: The user's model.
        path: Where the module is in it; empty if it is the model.
        module: The module.

    Raises:
        TypeError, ValueError: If it cannot run as a pipeline.
    """
    return next(make for kind, make in _KINDS if isinstance(module, kind))(root, path, module)
