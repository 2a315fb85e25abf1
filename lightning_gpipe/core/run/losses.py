"""The losses of micro-batches, and the loss of the mini-batch that they make.

A mean over the rows of the mini-batch is the mean over micro-batches of their means, weighted by
their rows. Where a loss is a mean over something else, such as the tokens that are no padding, its
own code must say of how many: it returns a dict with the loss and the ``"loss_weight"``.

What the weights add up to is known at the end, but the first backward starts before. So it starts
from an estimate, that all weights are as the first, and the gradients are corrected at the end, all
at once. An estimate is needed for half precision, in which the gradients of a loss times a thousand
tokens would overflow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

LOSS_WEIGHT = "loss_weight"  # in a dict that the caller's code returns, beside "loss"


class Losses:
    """The losses of one mini-batch.

    Args:
        m: The number of micro-batches.
        rows: The number of rows of each; None if that is not known.
        scale: What the gradients are multiplied by, as by a gradient scaler; a float or a 0-dim
            tensor.
    """

    def __init__(self, m: int, rows: Sequence[int] | None, scale: float | Tensor = 1.0) -> None:
        self._m = m
        self._rows = rows
        self._scale = scale
        self._losses: dict[int, Tensor] = {}
        self._weights: dict[int, float] = {}
        self._skipped: list[int] = []
        self._norm = 0.0  # what the weights are estimated to add up to; 0 before one is positive
        self._by_rows = True

    def add(self, i: int, result: Any) -> tuple[Tensor, Tensor] | None:
        """Add what the caller's code returned for micro-batch ``i``.

        Args:
            i: The micro-batch.
            result: The loss, a dict with it, or None.

        Returns:
            The loss in its graph, and the gradient that its backward starts from; None if there is
            none to run.

        Raises:
            TypeError: If the result has no loss.
            RuntimeError: If it is None, or has a weight, and that of another micro-batch does not;
                if a loss has several elements.
            ValueError: If a weight is negative, or missing.
        """
        loss, given = loss_and_weight(result)
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
        if not self._weights:
            self._by_rows = given is None
        elif self._by_rows != (given is None):
            raise RuntimeError(
                f"training_step must return {LOSS_WEIGHT!r} for every micro-batch or for none: got "
                f"it for some of {self._m} only."
            )
        weight = self._rows_of(i) if given is None else _checked(given)
        self._losses[i], self._weights[i] = loss.detach(), weight
        if not weight:  # the mean of nothing may be no number
            return None
        if not self._norm:
            self._norm = float(sum(self._rows or ())) if self._by_rows else self._m * weight
        seed = _beside(loss, self._scale) * (weight / self._norm)
        return loss, seed.to(loss.dtype).expand_as(loss)

    @property
    def skipped(self) -> bool:
        """Whether there is no loss, because the caller's code wants the batch to be skipped."""
        return bool(self._skipped)

    def total(self) -> tuple[Tensor, Tensor]:
        """The loss of the mini-batch, in no graph, and its gradient that all backwards amount to.

        Raises:
            ValueError: If all weights are zero.
        """
        together = sum(self._weights.values())
        if not together:
            raise ValueError(
                f"the weights of a batch must add up to more than 0: got {LOSS_WEIGHT}=0 for each "
                f"of {self._m} micro-batches. Return None for all to skip the batch."
            )
        first = self._losses[0]
        value = _beside(first, 0.0)
        for i, weight in self._weights.items():
            if weight:
                value = value + _beside(first, self._losses[i]) * (weight / together)
        seed = _beside(first, self._scale) * (together / self._norm)
        return value.to(first.dtype).reshape(first.shape), seed

    def _rows_of(self, i: int) -> float:
        if self._rows is None:
            raise ValueError(
                "the number of rows of each micro-batch must be known, by which their losses are "
                "weighted: this MicroBatching has no division(). Define it, or return "
                f"{{'loss': loss, {LOSS_WEIGHT!r}: weight}}."
            )
        return float(self._rows[i])


def loss_and_weight(result: Any) -> tuple[Tensor | None, Any]:
    """The loss and the weight of what the caller's code returned for a micro-batch.

    Either is None if there is none; other weights than None are not checked.

    Raises:
        TypeError: If the result has no loss, and is not None.
        RuntimeError: If the loss has several elements.
    """
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
    found = float(weight)
    if not found >= 0:
        raise ValueError(f"{LOSS_WEIGHT!r} must be 0 or more: got {found}.")
    return found


def _beside(loss: Tensor, number: float | Tensor) -> Tensor:
    """A number on the device of a loss, in its precision or a higher one."""
    dtype = torch.float64 if loss.dtype == torch.float64 else torch.float32
    if isinstance(number, Tensor):
        return number.detach().to(loss.device, dtype).reshape(())
    return torch.tensor(number, dtype=dtype, device=loss.device)
