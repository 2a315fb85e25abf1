"""A loss whose gradients are known already, as one ordinary node in the caller's graph.

Where each micro-batch has a loss of its own, forwards and backwards alternate, and all gradients
are there when the loss of the mini-batch is. They must not be written into ``.grad`` then: the
caller may set that to None before it calls backward, as Lightning does, and hooks, accumulation
and gradient scalers expect them from backward. So they wait in a pair of nodes as in Note
[The blocking node must be a CPU node], whose backward hands them over, on several devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from lightning_gpipe.core.faithful import Streams
from lightning_gpipe.core.run.autograd_node import BackwardOnce, connect

Pair = tuple[Tensor, Tensor]  # a leaf and its gradient


def with_known_gradients(
    value: Tensor, pairs: Sequence[Pair], seed: Tensor, streams: Streams
) -> Tensor:
    """Return a loss whose backward hands over known gradients.

    Args:
        value: The loss, in no graph.
        pairs: The leaves, each once, with their gradients, which will be edited.
        seed: The gradient of the loss for which these are right; others are proportional.
        streams: The streams on which they were computed.

    Returns:
        The loss in the caller's graph; in none if there are no leaves.
    """
    if not pairs:
        return value
    leaves, gradients = zip(*pairs, strict=True)
    backward = BackwardOnce(
        partial(_scaled, list(gradients), seed, streams),
        "a loss for each micro-batch cannot be differentiated twice: got a backward with "
        "create_graph=True. Compute what needs it, such as a gradient penalty, with "
        "schedule='fill_drain' on the plain module.",
        "backward must run once through the loss of a step: got a second one, and the first "
        "has handed the gradients over. Run the step again.",
    )
    [loss] = connect(backward, leaves, [value.clone()])
    return loss


def _scaled(
    gradients: list[Tensor], seed: Tensor, streams: Streams, of_loss: Sequence[Tensor | None]
) -> list[Tensor]:
    """Scale the gradients of the leaves by that of the loss."""
    [gradient] = of_loss
    assert gradient is not None, "the loss is the only output"
    try:
        with streams.entered():
            _multiply(gradients, gradient.detach() / seed.to(gradient))
        streams.lend(gradients)
    finally:
        streams.rejoin()
    return gradients


def _multiply(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply in place; skip a factor of one on the CPU, where reading it does not wait."""
    if factor.device.type == "cpu" and factor.item() == 1.0:
        return
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        if gradient.layout is torch.strided:
            groups.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        else:
            gradient.mul_(factor.to(gradient.device, gradient.dtype))
    for (device, _), group in groups.items():
        torch._foreach_mul_(group, factor.to(device))
