"""The front-end for each type of module."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from lightning_gpipe.core.frontends.frontend import Frontend
from lightning_gpipe.core.frontends.module_list.loop import Loop
from lightning_gpipe.core.frontends.sequential import Layers
from lightning_gpipe.core.frontends.traced import Traced

# The model, and the path of the module in it. The first type that fits decides.
FRONTENDS: tuple[tuple[type[nn.Module], Callable[[nn.Module, str], Frontend]], ...] = (
    (nn.Sequential, Layers),
    (nn.ModuleList, Loop),
    (nn.Module, Traced),
)


def frontend_of(root: nn.Module, path: str, module: nn.Module) -> Frontend:
    """Return the front-end for a module, which is at ``path`` in ``root``.

    Raises:
        TypeError, ValueError: If it cannot run as a pipeline.
    """
    return next(make for kind, make in FRONTENDS if isinstance(module, kind))(root, path)
