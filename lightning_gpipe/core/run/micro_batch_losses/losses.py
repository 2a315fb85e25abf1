"""The losses of micro-batches, and the loss of the mini-batch that they make.

A mean over the rows of the mini-batch is the mean over micro-batches of their means, weighted by
their rows. Where a loss is a mean over something else, such as the tokens that are not padding, the
user's code returns a dict with the loss and their number as ``"loss_weight"``.

The sum of the weights is known at the end, but the first backward starts before. So it starts from
an estimate, that all weights are as the first, and the gradients are corrected at the end. Half
precision needs an estimate: the gradients of a loss times a thousand tokens would overflow.

All gradients are there when the loss is, but must not be written into ``.grad`` then: the caller
may set that to None before it calls backward, as Lightning does, and hooks, accumulation and
gradient scalers expect them from backward. So they wait in a pair of nodes as in Note [The blocking
node must be a CPU node], whose backward hands them over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_gpipe.core.data import Term, shard_of, trained_sums, warn_of_equal_sums
from lightning_gpipe.core.faithful import Streams
from lightning_gpipe.core.run.autograd_node import BackwardOnce, connect
from lightning_gpipe.core.run.backward.sums import Pair
from lightning_gpipe.core.run.micro_batch_losses.target_means import (
    check_target_weights,
    target_weights,
)

LOSS_WEIGHT = "loss_weight"  # in a dict that the caller's code returns, beside "loss"


class Total(NamedTuple):
    """The loss of a mini-batch, in no graph."""

    value: Tensor
    seed: Tensor  # the gradient of all backwards
    scale: Tensor  # the seed, had the sum of the weights been known
    estimated: bool  # whether these differ
    requires_grad: bool  # perhaps only for parameters of other processes

    @property
    def correction(self) -> Tensor | None:
        """The factor that turns the gradients into those of the weighted mean; None if it is 1."""
        if not self.estimated:
            return None
        return self.scale.to(self.value.dtype) / self.seed.to(self.value.dtype)


class Losses:
    """The losses of ``m`` micro-batches; ``scale`` is the factor of a gradient scaler.

    ``read`` are the types of devices on which it is read what they are means over.
    """

    def __init__(
        self,
        m: int,
        rows: Sequence[int] | None,
        scale: float | Tensor = 1.0,
        *,
        read: Collection[str] = (),
    ) -> None:
        self._m = m
        self._rows = rows
        self._scale = scale
        self._losses: dict[int, Tensor] = {}
        self._weights: dict[int, float] = {}
        self._seeds: dict[tuple[float, torch.dtype, torch.device], Tensor] = {}
        self._skipped: list[int] = []
        self._norm = 0.0  # the estimated sum of the weights; 0 before one is positive
        self._by_rows = True
        self._read = read
        self._targets: list[list[Tensor]] = []  # the weight of those of each loss over them
        self._sums: str | None = None  # the name of a loss term that is a sum
        self._trained_sums: dict[int, list[Term]] = defaultdict(list)
        self._requires_grad = False

    def add(self, i: int, result: Any) -> tuple[Tensor, Tensor] | None:
        """Add the result for micro-batch ``i``; return the loss in its graph and its gradient."""
        loss, weight_of_code = loss_and_weight(result)
        if loss is None:
            self._skipped.append(i)
        if self._skipped and (self._losses or loss is not None):
            raise RuntimeError(
                "training_step must return a loss for every micro-batch of a batch, or None for "
                f"all, which skips the batch: got None for {self._skipped} of {self._m} only. "
                "Leave such rows out of the loss instead, or write schedule='fill_drain'."
            )
        if loss is None:
            return None
        self._check_kind(weight_of_code)
        weight = self._rows_of(i) if weight_of_code is None else _checked(weight_of_code)
        self._losses[i], self._weights[i] = loss.detach(), weight
        self._requires_grad |= loss.requires_grad
        reads = self._by_rows and loss.device.type in self._read
        if reads and (found := target_weights(loss.grad_fn)):
            self._targets.append(found)
        if not weight:  # the mean of nothing may be no number
            return None
        if not self._norm:
            self._norm = float(sum(self._rows or ())) if self._by_rows else self._m * weight
        kind = weight, loss.dtype, loss.device
        if kind not in self._seeds:
            seed = _beside(loss, self._scale) * (weight / self._norm)
            self._seeds[kind] = seed.to(loss.dtype)
        return loss, self._seeds[kind].clone().expand_as(loss)  # a hook may edit its gradient

    def _check_kind(self, weight_of_code: Any) -> None:
        if not self._weights:
            self._by_rows = weight_of_code is None
        elif self._by_rows != (weight_of_code is None):
            raise RuntimeError(
                f"training_step must return {LOSS_WEIGHT!r} for every micro-batch or for none: got "
                f"it for some of {self._m} only."
            )
        if self._sums and weight_of_code is not None:
            raise RuntimeError(
                f"a loss that is weighted by {LOSS_WEIGHT!r} must have no sums of layers: got the "
                f"loss term {self._sums!r}, whose share is known for weights by rows only. Hand it "
                "out with reduction='mean', or write schedule='fill_drain'."
            )

    def weighted(self, i: int, term: Term) -> Term:
        """Return a term to be weighted: a sum counts whole, not by its share of the rows."""
        if term.reduction == "mean":
            return term
        self._sums = term.name
        if term.value.device.type in self._read:
            self._trained_sums[i] += trained_sums([term])
        return term._replace(value=term.value * (sum(self._rows or ()) / self._rows_of(i)))

    @property
    def complete(self) -> bool:
        return len(self._losses) + len(self._skipped) == self._m

    @property
    def weights(self) -> list[float]:
        """The weight of each micro-batch; that of its rows if the batch is skipped."""
        by_rows = dict(enumerate(map(float, self._rows or [1] * self._m)))
        return [(self._weights or by_rows)[i] for i in range(self._m)]

    def total(self) -> Total | None:
        """Return the loss of the mini-batch; None if the code skips the batch."""
        if self._skipped:
            return None
        together = sum(self._weights.values())
        if not together:
            raise ValueError(
                f"the weights of a batch must add up to more than 0: got {LOSS_WEIGHT}=0 for each "
                f"of {self._m} micro-batches. Return None for all to skip the batch."
            )
        if len(self._targets) == self._m:
            check_target_weights(self._targets, [self._weights[i] for i in self._losses])
        warn_of_equal_sums(list(self._trained_sums.values()))
        first = self._losses[0]
        value = _beside(first, 0.0)
        for i, weight in self._weights.items():
            if weight:
                value = value + _beside(first, self._losses[i]) * (weight / together)
        scale, estimated = _beside(first, self._scale), self._norm not in (0.0, together)
        seed = scale * (together / self._norm) if estimated else scale
        value = value.to(first.dtype).reshape(first.shape)
        return Total(value, seed, scale, estimated, self._requires_grad)

    def _rows_of(self, i: int) -> float:
        if self._rows is None:
            raise ValueError(
                "the number of rows of each micro-batch must be known, by which their losses are "
                "weighted: this MicroBatching has no division(). Define it, or return "
                f"{{'loss': loss, {LOSS_WEIGHT!r}: weight}}."
            )
        return float(self._rows[i])


def loss_and_weight(result: Any) -> tuple[Tensor | None, Any]:
    """Return the loss and the unchecked weight in a result of the caller's code, if any."""
    if result is None:
        return None, None
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, Tensor):
        raise TypeError(
            "training_step must return the loss, a dict with the key 'loss', or None: got "
            f"{type(result).__name__}."
        )
    if loss.numel() != 1:
        raise RuntimeError(
            f"the loss of a micro-batch must have one element: got shape {tuple(loss.shape)}."
        )
    return loss, result.get(LOSS_WEIGHT) if isinstance(result, Mapping) else None


def _checked(weight: Any) -> float:
    # Of a tensor on a GPU this waits for it: whether it is zero must be known before the backward.
    number = float(weight)
    if not number >= 0:
        raise ValueError(f"{LOSS_WEIGHT!r} must be 0 or more: got {number}.")
    return number


def _beside(loss: Tensor, number: float | Tensor) -> Tensor:
    """Return a number on the device of a loss, in its precision or a higher one."""
    dtype = torch.float64 if loss.dtype == torch.float64 else torch.float32
    if isinstance(number, Tensor):
        return number.detach().to(loss.device, dtype).reshape(())
    return torch.tensor(number, dtype=dtype, device=loss.device)


def with_known_gradients(
    value: Tensor, pairs: Sequence[Pair], seed: Tensor, streams: Streams
) -> Tensor:
    """Return a loss whose backward hands over these gradients, and edits them.

    They are right for ``seed`` as the gradient of the loss, and proportional to it.
    """
    if not pairs:  # all are in other processes, or code that nn.Module does not know has them
        pairs = [(torch.zeros((), requires_grad=True), torch.zeros(()))]
    leaves, gradients = zip(*pairs, strict=True)
    backward = BackwardOnce(
        partial(_scaled, list(gradients), seed, streams),
        "a loss for each micro-batch cannot be differentiated twice: got a backward with "
        "create_graph=True. For what needs it, such as a gradient penalty, run the layers one by "
        "one in training_step: for layer in self.layers: x = layer(x).",
        "backward must run once through the loss of a step: got a second one, and the first "
        "has handed the gradients over. Run the step again.",
    )
    [loss] = connect(backward, leaves, [value.clone()])
    return loss


def _scaled(
    gradients: list[Tensor], seed: Tensor, streams: Streams, of_loss: Sequence[Tensor | None]
) -> list[Tensor]:
    [gradient] = of_loss
    assert gradient is not None, "the loss is the only output"
    with streams.entered():
        multiply(gradients, gradient.detach() / seed.to(gradient))
    streams.lend(gradients)
    streams.rejoin()
    return gradients


def multiply(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply in place; skip a factor of one on the CPU, where reading it does not wait."""
    if factor.device.type == "cpu" and factor.item() == 1.0:
        return
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in map(shard_of, gradients):
        if gradient.layout is torch.strided:
            groups.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        else:
            gradient.mul_(factor.to(gradient.device, gradient.dtype))
    for (device, _), group in groups.items():
        torch._foreach_mul_(group, factor.to(device))
