"""Sums of the gradients of a leaf, over micro-batches and stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from lightning_gpipe.core.run.backward.roots import root_of, run_backward

Gradients = list[Tensor | None]
Pair = tuple[Tensor, Tensor]  # a leaf, and a gradient of it

_NONE = None, None  # in the place of a leaf and its sum


def sum_gradients(pairs: Iterable[Pair], leaves: Sequence[Tensor]) -> Gradients:
    """Return the sum of each leaf's gradients on its device; None for a leaf without any.

    A leaf that is not among ``leaves`` was used by a recomputation only, or without having been
    registered with nn.Module: it accumulates its gradient here, as no input of the node.
    """
    sum_of: dict[int, Pair] = {}  # of each leaf by id: a hash of it is slow
    several: dict[int, list[Tensor]] = {}
    for leaf, gradient in pairs:
        key = id(leaf)
        if gradient.device != leaf.device:
            gradient = gradient.to(leaf.device)
        if key not in sum_of:
            sum_of[key] = leaf, gradient
        else:
            several.setdefault(key, [sum_of[key][1]]).append(gradient)
    for key, gradients in several.items():
        sum_of[key] = sum_of[key][0], _sum(gradients)
    sums = [sum_of.pop(id(leaf), _NONE)[1] for leaf in leaves]
    for leaf, gradient in sum_of.values():
        run_backward([root_of(leaf)], [gradient])
    return sums


def add_gradient(sums: dict[int, Pair], leaf: Tensor, gradient: Tensor) -> None:
    """Add to the gradient of a leaf in ``sums``, which has leaves with their gradients by id."""
    _, before = sums.get(id(leaf), (leaf, None))
    sums[id(leaf)] = leaf, gradient if before is None else before + gradient


def _sum(gradients: list[Tensor]) -> Tensor:
    """Return the sum; sparse gradients, as of nn.Embedding(sparse=True), are added last."""
    gradients.sort(key=lambda gradient: gradient.is_sparse)
    total = gradients[0]
    for gradient in gradients[1:]:
        total = total.add_(gradient)
    return total
