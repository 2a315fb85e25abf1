"""Finds losses that are means over targets, of which micro-batches may have different numbers.

``F.cross_entropy`` and ``F.nll_loss`` divide by the weight of the targets that they do not ignore.
Where the mean over rows of the mini-batch is made of these, a row counts more with fewer targets
beside it. A few rows of the first batch do not show this: the first padding may come later. The
node of the loss has saved the weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

_MEAN = 1  # as PyTorch's operators know the reduction
_LOSSES = frozenset({"NllLossBackward0", "NllLoss2DBackward0"})
_KEEPING = frozenset(  # the value of an argument, or the sum of several
    f"{name}Backward0"
    for name in ["Add", "Sub", "View", "Reshape", "Squeeze", "ToCopy", "Clone", "Alias"]
)


def target_weights(node: Any) -> list[Tensor]:
    """Return the weight of the targets of each mean over targets in a loss, by its node."""
    kind = node.__class__.__name__
    if kind in _LOSSES and node._saved_reduction == _MEAN:
        return [node._saved_total_weight]
    if kind in _KEEPING:
        return [weight for source, _ in node.next_functions for weight in target_weights(source)]
    return []


def check_target_weights(found: Sequence[Sequence[Tensor]], rows: Sequence[float]) -> None:
    """Raise RuntimeError if micro-batches have other shares of the targets than of the rows."""
    if len({len(each) for each in found}) > 1:
        return  # the code has several ways
    for column in zip(*found, strict=True):
        weights = [float(weight) for weight in column]
        shares = [weight / count for weight, count in zip(weights, rows, strict=True)]
        if max(shares) - min(shares) > 1e-4 * max(shares):
            raise RuntimeError(
                "a loss that is a mean over targets must tell how many, since micro-batches are "
                f"weighted by rows: got one by cross_entropy or nll_loss with {_listed(weights)} "
                f"targets that count in micro-batches of {_listed(rows)} rows. Return their number "
                "or, with weights of classes, the sum of these: {'loss': loss, 'loss_weight': "
                "number}. Or write schedule='fill_drain'."
            )


def _listed(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:g}" for number in numbers)
