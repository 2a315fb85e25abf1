"""Chooses the modules to pipeline where the user names none: those that hold the work.

Each network, a child of the LightningModule, is piped by the nn.Sequential or nn.ModuleList with at
least nine tenths of its work, or else whole if its forward can be traced. The weights of layers
tell the work, not a run: the choice is the same in a fit, in an evaluation and in every process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torchmetrics import Metric, MetricCollection

from lightning_gpipe.core.frontends import UnsupportedForward, candidates
from lightning_gpipe.core.pipeline import PipedModule

_LOOKED_UP = nn.Embedding, nn.EmbeddingBag
_MOST_ASIDE = 0.1  # of the work


def default_modules(
    root: nn.Module, balance: Any, *, several: bool, traced: bool
) -> list[PipedModule]:
    """Choose the modules to pipeline; a list ``balance`` chooses that of which it has the layers.

    With ``traced``, a module may be piped whole, as its forward is traced. Raises a ValueError that
    says what there is if no module holds most of the work.
    """
    networks, reasons = _networks(root), list[str]()
    found = [x for path in networks for x in _pipes_of(root, path, traced=traced, reasons=reasons)]
    if isinstance(balance, list):
        others = (PipedModule(root, *item) for item in candidates(root).items())
        counted = [piped for piped in found if piped.takes(balance)]
        counted = counted or [piped for piped in others if piped.takes(balance)]
        if len(counted) == 1:
            return counted
        found, several = counted or found, False
    total = _size(_weights(networks.values()))
    if several:
        found = [piped for piped in found if _matters(piped.module, total)]
    elif len(found) > 1:
        found = [piped for piped in found if 2 * _size(_weights([piped.module])) > total]
    if not found or 2 * _size(_weights(piped.module for piped in found)) < total:
        raise ValueError(_no_choice(root, reasons))
    return found


def _networks(root: nn.Module) -> dict[str, nn.Module]:
    """Return the children with parameters, by name; frozen ones may be most of the work."""
    return {
        name: child
        for name, child in root.named_children()
        if not isinstance(child, Metric | MetricCollection)
        and any(True for _ in child.parameters())
    }


def _pipes_of(
    root: nn.Module, path: str, *, traced: bool, reasons: list[str]
) -> Sequence[PipedModule]:
    network = root.get_submodule(path)
    containers = {f"{path}.{name}".rstrip("."): x for name, x in candidates(network).items()}
    for name, container in containers.items():
        if _holds(container, network):
            return [PipedModule(root, name, container)]
    if traced and any(name != "parametrizations" for name, _ in network.named_children()):
        try:
            whole = PipedModule(root, path, network)
        except (UnsupportedForward, TypeError) as error:
            reasons.append(f"{path}: {error}")
        else:
            if not _is_coarse(whole, containers):
                return [whole]
    return [
        PipedModule(root, name, container)
        for name, container in containers.items()
        if not any(name.startswith(f"{other}.") for other in containers)  # as a list's Sequentials
    ]


def _holds(container: nn.Module, network: nn.Module) -> bool:
    """Return True if a container has nine tenths of a network's work, and all its convolutions."""
    weights = _weights([network])
    aside = weights - _weights([container])
    return not _convolved(aside) and _size(aside) <= _MOST_ASIDE * _size(weights)


def _matters(module: nn.Module, total: int) -> bool:
    """Return True if a module may have more than little of the work of ``total`` weights."""
    weights = _weights([module])
    return _convolved(weights) or _size(weights) > _MOST_ASIDE * total


def _is_coarse(whole: PipedModule, containers: Iterable[str]) -> bool:
    """Return True if one layer, with containers in it, has most of the work of a network."""
    most = _size(_weights([whole.module])) / 2
    return any(
        _size(_weights([whole.root.get_submodule(unit)])) > most
        for unit in whole.frontend.units
        if any(name.startswith(f"{unit}.") for name in containers)
    )


def _weights(modules: Iterable[nn.Module]) -> set[nn.Parameter]:
    """Return the parameters that rows are multiplied or convolved with."""
    return {
        parameter
        for module in modules
        for layer in module.modules()
        if not isinstance(layer, _LOOKED_UP)
        for parameter in layer.parameters(recurse=False)
        if parameter.dim() > 1 and len(parameter) > 1  # others are added: of norms, of positions
    }


def _size(weights: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in weights)


def _convolved(weights: Iterable[nn.Parameter]) -> bool:
    return any(parameter.dim() > 2 for parameter in weights)


def _no_choice(root: nn.Module, reasons: Sequence[str]) -> str:
    owner = type(root).__name__
    lines = [
        f"\n  module={path!r}: {type(module).__name__} of {len(list(module.children()))}, "
        f"{_size(module.parameters()):,} parameters"
        for path, module in candidates(root).items()
    ]
    if lines:
        return (
            f"the module to pipeline must be unambiguous, and hold most of the work: got "
            f"{len(lines)} in {owner}. Choose one with module=..., or a list of several:"
            f"{''.join(lines)}" + "".join(f"\n  not whole, {reason}" for reason in reasons)
        )
    reasons = [*reasons, *_unregistered(root)]
    return (
        f"{owner} must hold layers to pipeline: got no nn.Sequential, no nn.ModuleList, and no "
        "network with a forward that can be cut. Put the layers into one, as in self.layers = "
        f"nn.Sequential(...), in __init__ or configure_model. Layers that {owner} calls itself, "
        "move together with these calls into an nn.Module of their own."
        + "".join(f"\n  {reason}" for reason in reasons)
    )


def _unregistered(root: nn.Module) -> list[str]:
    """Say which attributes are plain lists of modules, which have no parameters for PyTorch."""
    return [
        f"{name}: a plain {type(value).__name__} of modules, whose parameters no optimizer gets. "
        "Write nn.ModuleList(...)."
        for name, value in vars(root).items()
        if isinstance(value, list | tuple) and any(isinstance(x, nn.Module) for x in value)
    ]
