"""Loss terms that layers keep in an attribute, whose gradient does not pass through a pipeline.

A term is a single number that was computed from parameters and does not influence the output. The
graph of a plain run shows both. Attention weights or hidden states that a layer keeps are parts of
the output's graph, or no single numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_gpipe.core.verify.named_values import tensors

_OF_TORCH = frozenset(vars(nn.Module()))  # attributes that every module has


def terms_in_attributes(layers: Sequence[nn.Module], output: Any) -> Iterator[tuple[int, str]]:
    """Yield the index of each layer with a loss term, and the attribute, such as ``"inner.kl"``.

    Args:
        layers: The layers, after a plain run.
        output: The output of the last one.
    """
    used = _behind(tensors(output).values())
    parameters = {id(parameter) for layer in layers for parameter in layer.parameters()}
    for k, layer in enumerate(layers):
        for name, tensor in _attributes(layer):
            if tensor.numel() != 1 or tensor.grad_fn is None or tensor.grad_fn in used:
                continue
            leaves = (getattr(node, "variable", None) for node in _behind([tensor]))
            if any(id(leaf) in parameters for leaf in leaves):
                yield k, name


def _attributes(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in attributes of a layer and the modules within it, with their names."""
    for path, module in layer.named_modules():
        for name, value in vars(module).items():
            if name not in _OF_TORCH:
                for tensor in tensors(value).values():
                    yield f"{path}.{name}".lstrip("."), tensor


def _behind(roots: Iterable[Tensor]) -> set[Any]:
    """Return all nodes of the graphs that end in ``roots``."""
    waiting = [root.grad_fn for root in roots if root.grad_fn is not None]
    nodes: set[Any] = set(waiting)
    while waiting:
        new = {node for node, _ in waiting.pop().next_functions if node is not None} - nodes
        nodes |= new
        waiting += new
    return nodes
