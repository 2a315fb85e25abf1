"""Finds the module to pipeline inside a larger one, and the front-end for its type."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from lightning_gpipe.core.frontends.frontend import Frontend
from lightning_gpipe.core.frontends.module_list.loop import Loop
from lightning_gpipe.core.frontends.sequential import Layers
from lightning_gpipe.core.frontends.traced import TracedForward
from lightning_gpipe.core.layout import check_initialised, check_sequential, is_plain

# The model, and the path of the module in it. The first type that fits decides.
FRONTENDS: tuple[tuple[type[nn.Module], Callable[[nn.Module, str], Frontend]], ...] = (
    (nn.Sequential, Layers),
    (nn.ModuleList, Loop),
    (nn.Module, TracedForward),
)


def frontend_of(root: nn.Module, path: str, module: nn.Module) -> Frontend:
    """Return the front-end for a module, which is at ``path`` in ``root``."""
    return next(make for kind, make in FRONTENDS if isinstance(module, kind))(root, path)


def module_at(root: nn.Module, path: str) -> nn.Module:
    """Return the module to pipeline at a path, such as ``"net.layers"``; raise if there is none."""
    modules = dict(root.named_modules(remove_duplicate=False))
    if path not in modules:
        names = ", ".join(map(repr, candidates(root))) or "no nn.Sequential and no nn.ModuleList"
        raise ValueError(
            f"module must be the path of a module in {type(root).__name__}: got {path!r}, "
            f"where there is none. It holds {names}."
        )
    module = modules[path]
    if isinstance(module, nn.Sequential):
        check_sequential(module, f"module={path!r}")
    return module


def heaviest(root: nn.Module) -> tuple[str, nn.Module] | None:
    """Find the candidate with more than half of the parameters of ``root``, with its path.

    Of a ModuleList and a Sequential within it, both with more than half, it is the Sequential.
    """
    check_initialised(root, type(root).__name__)
    total = _weight(root)
    heavy = (item for item in candidates(root).items() if 2 * _weight(item[1]) > total)
    return next(heavy, None)


def candidates(root: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost plain Sequentials, and then the outermost ModuleLists, by path.

    ModuleLists within a Sequential, and those without parameters, are left out.
    """
    sequentials = _outermost(root, is_plain)
    either = _outermost(root, lambda module: is_plain(module) or _is_list(module))
    return sequentials | {path: module for path, module in either.items() if _is_list(module)}


def _outermost(root: nn.Module, accepts: Callable[[nn.Module], bool]) -> dict[str, nn.Module]:
    if accepts(root):
        return {"": root}
    modules: dict[str, nn.Module] = {}
    for name, child in root.named_children():
        for path, module in _outermost(child, accepts).items():
            modules[f"{name}.{path}" if path else name] = module
    return modules


def _is_list(module: nn.Module) -> bool:
    layers = isinstance(module, nn.ModuleList) and not isinstance(module, ParametrizationList)
    return layers and _weight(module) > 0


def _weight(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
