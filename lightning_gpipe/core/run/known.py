"""A loss whose gradients are known already, as one ordinary node in the caller's graph.

Where each micro-batch has a loss of its own, forwards and backwards alternate, and all gradients
are there when the loss of the mini-batch is. They must not be written into ``.grad`` then: the
caller may set that to None before it calls backward, as Lightning does, and hooks, accumulation
and gradient scalers expect them from backward. So they wait in a node, whose backward hands them
over::

    parameters --> _Known --(scalar on CPU)--> _Loss --> loss

The first node is one on the CPU for the reason of Note [The blocking node must be a CPU node],
although it does not block: it has gradients on several devices, and is asked for them by the
thread that calls ``backward()``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from lightning_gpipe.core.faithful import Streams, not_compiled

Pair = tuple[Tensor, Tensor]  # a leaf and its gradient


def with_known_gradients(
    value: Tensor, pairs: Sequence[Pair], seed: Tensor, streams: Streams
) -> Tensor:
    """A loss whose backward gives leaves gradients that are known.

    Args:
        value: The loss, in no graph.
        pairs: The leaves, each once, with their gradients, which are given away.
        seed: The gradient of the loss for which these are right; others are proportional.
        streams: Those on which they were computed.

    Returns:
        The loss in the caller's graph; in none if there are no leaves. A second backward through
        it, and one with ``create_graph=True``, raise RuntimeError.
    """
    if not pairs:
        return value
    leaves, gradients = zip(*pairs, strict=True)
    known = _Gradients(list(gradients), seed, streams)
    scalar = _Known.apply(known, *leaves)
    loss: Tensor = _Loss.apply(known, value, scalar)
    return loss


class _Gradients:
    """The gradients, and that of the loss once it is known.

    Attributes:
        given: The gradient of the loss.
    """

    def __init__(self, gradients: list[Tensor], seed: Tensor, streams: Streams) -> None:
        self.given: Tensor | None = None
        self._gradients: list[Tensor] | None = gradients
        self._seed = seed
        self._streams = streams

    def take(self) -> list[Tensor]:
        """The gradients for the given one of the loss, no longer held here."""
        gradients, given = self._gradients, self.given
        assert gradients is not None and given is not None, "checked when the loss's came"
        self._gradients = None
        try:
            with self._streams.entered():
                _multiply(gradients, given.detach() / self._seed.to(given))
            self._streams.lend(gradients)
        finally:
            self._streams.rejoin()
        return gradients

    def refuse_another_pass(self) -> None:
        """Raise if backward would have to run a second time, or to be differentiated."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a loss for each micro-batch cannot be differentiated twice: got a backward with "
                "create_graph=True. Compute what needs it, such as a gradient penalty, with "
                "schedule='fill_drain' on the plain module."
            )
        if self._gradients is None:
            raise RuntimeError(
                "backward must run once through the loss of a step: got a second one, and the "
                "first has handed the gradients over. Run the step again."
            )


def _multiply(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply in place; on the CPU not by one, which elsewhere only the device knows."""
    if factor.device.type == "cpu" and factor.item() == 1.0:
        return
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        if gradient.layout is torch.strided:
            found.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        else:
            gradient.mul_(factor.to(gradient.device, gradient.dtype))
    for (device, _), each in found.items():
        torch._foreach_mul_(each, factor.to(device))


class _Known(Function):
    """The node of the leaves: its backward returns their gradients."""

    @staticmethod
    def forward(ctx: Any, known: _Gradients, *leaves: Tensor) -> Tensor:
        ctx.known = known
        return torch.zeros((), device="cpu")

    @staticmethod
    @not_compiled
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:
        return (None, *ctx.known.take())


class _Loss(Function):
    """The node of the loss: its backward stores the loss's gradient."""

    @staticmethod
    def forward(ctx: Any, known: _Gradients, value: Tensor, scalar: Tensor) -> Tensor:
        ctx.known = known
        return value.clone()

    @staticmethod
    @not_compiled
    def backward(ctx: Any, *given: Tensor) -> tuple[Any, ...]:
        known: _Gradients = ctx.known
        known.refuse_another_pass()
        [known.given] = given
        return (None, None, torch.zeros((), device="cpu"))
