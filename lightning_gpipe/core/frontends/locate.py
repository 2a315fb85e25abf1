"""Finds the nn.Sequential to pipeline inside a larger module.

A LightningModule seldom *is* an nn.Sequential; it holds one, often beside a loss and metrics. The
user may name it. If they do not, it is the only one, or the one with more than half of all
parameters; if neither exists, an error lists the candidates.
"""

from __future__ import annotations

from torch import nn

from lightning_gpipe.core.plan import check_sequential, is_plain


def locate(root: nn.Module, path: str | None) -> tuple[str, nn.Sequential]:
    """The nn.Sequential to pipeline, and its path from ``root``.

    Args:
        root: The module that holds it.
        path: Where it is, such as ``"net.layers"``, or None to search. A Sequential within another
            one is not a candidate, nor is one whose class has a forward of its own.

    Raises:
        TypeError: If the module at ``path`` is not an nn.Sequential that can be cut.
        ValueError: If there is no module at ``path``, no candidate, or no choice between several.
    """
    if path is not None:
        return path, _at(root, path)
    found = _candidates(root)
    if len(found) == 1:
        return next(iter(found.items()))
    weights = {path: _weight(module) for path, module in found.items()}
    total = _weight(root)
    heavy = [path for path, weight in weights.items() if 2 * weight > total]
    if len(heavy) == 1:
        return heavy[0], found[heavy[0]]
    raise ValueError(_no_choice(root, found, weights))


def _at(root: nn.Module, path: str) -> nn.Sequential:
    modules = dict(root.named_modules())
    if path not in modules:
        known = ", ".join(map(repr, _candidates(root))) or "no nn.Sequential"
        raise ValueError(
            f"module must be the path of an nn.Sequential in {type(root).__name__}: got {path!r}, "
            f"where there is none. It holds {known}."
        )
    module = modules[path]
    check_sequential(module, f"module={path!r}")
    assert isinstance(module, nn.Sequential)
    return module


def _candidates(root: nn.Module) -> dict[str, nn.Sequential]:
    """The outermost Sequentials below ``root``, or ``root`` itself, by path."""
    if is_plain(root):
        return {"": root}
    found: dict[str, nn.Sequential] = {}
    for name, child in root.named_children():
        for path, module in _candidates(child).items():
            found[f"{name}.{path}" if path else name] = module
    return found


def _weight(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _no_choice(root: nn.Module, found: dict[str, nn.Sequential], weights: dict[str, int]) -> str:
    owner = type(root).__name__
    if not found:
        return (
            f"{owner} must hold an nn.Sequential to pipeline: got none. Put the "
            "layers to pipeline into one, as in self.layers = nn.Sequential(...), in __init__ or "
            "configure_model."
        )
    listed = "".join(
        f"\n  module={path!r}: {len(module)} layers, {weights[path]:,} parameters"
        for path, module in found.items()
    )
    return (
        f"the nn.Sequential to pipeline must be unambiguous: got {len(found)} in {owner}, none "
        f"with more than half of its parameters. Choose one with module=...:{listed}"
    )
