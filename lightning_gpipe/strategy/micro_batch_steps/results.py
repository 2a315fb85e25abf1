"""The results of training_step for the micro-batches, as one result for the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gpipe.core.pipeline import Outcome
from lightning_gpipe.core.run import LOSS_WEIGHT


def result_of(outcome: Outcome) -> Any:
    """The result of a step, for callbacks and for Lightning's own loop.

    A dict has the loss of the batch; its other tensors are concatenated along dim 0, and numbers
    averaged, weighted by rows. Other values become a list with an entry for each micro-batch,
    unless all are equal.
    """
    first = outcome.results[0]
    if outcome.loss is None or not isinstance(first, Mapping):
        return outcome.loss
    rows = outcome.rows or [1] * len(outcome.results)
    others = {
        key: _joined([result.get(key) for result in outcome.results], rows)
        for key in first
        if key not in ("loss", LOSS_WEIGHT)
    }
    return {"loss": outcome.loss, **others}


def _joined(values: Sequence[Any], rows: Sequence[int]) -> Any:
    """The values of a key for all micro-batches, as one value."""
    first = values[0]
    if isinstance(first, Mapping):
        return {key: _joined([value[key] for value in values], rows) for key in first}
    if all(isinstance(value, Tensor) and value.dim() > 0 for value in values):
        return torch.cat(list(values))
    if all(map(_is_number, values)):
        total = sum(rows)
        return sum(value * (size / total) for value, size in zip(values, rows, strict=True))
    if not any(isinstance(value, Tensor) for value in values):
        if all(value == first for value in values):
            return first
        if all(isinstance(value, list) for value in values):
            return [entry for value in values for entry in value]
    return list(values)


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0 and value.is_floating_point()
    return isinstance(value, float)
