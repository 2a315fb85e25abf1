"""The result of a step, joined from those of training_step for its micro-batches.

A value does not say how it depends on the rows, so its type decides: tensors, and lists with an
entry for each row, are concatenated in the order of the batch, floats are averaged, integers are
counts, and structures are joined by entries.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_gpipe.core.pipeline import Outcome
from lightning_gpipe.core.run import LOSS_WEIGHT


def result_of(
    outcome: Outcome, constants: Sequence[Any] = (), others: set[str] | None = None
) -> Any:
    """Return the result of a step; ``constants`` are the same for all micro-batches.

    ``others`` gets the names of what was none of them, and is given again with the next step.
    """
    results = outcome.results
    if outcome.loss is None or not all(isinstance(result, Mapping) for result in results):
        return outcome.loss
    known = {"loss": outcome.loss}
    if LOSS_WEIGHT in results[0]:
        known[LOSS_WEIGHT] = sum(result[LOSS_WEIGHT] for result in results)
    rest = [key for key in dict.fromkeys(chain(*results)) if key not in known]
    joining = _Joining(outcome, constants, set() if others is None else others)
    return known | joining.entries("", results, rest)


def mean_of(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """Return the weighted mean. The mean of nothing may be no number, and has no weight."""
    pairs = [pair for pair in zip(values, weights, strict=True) if pair[1]]
    pairs = pairs or [(value, 1.0) for value in values]
    total = sum(weight for _, weight in pairs)
    return sum(value * (weight / total) for value, weight in pairs)


class _Joining:
    def __init__(self, outcome: Outcome, constants: Sequence[Any], others: set[str]) -> None:
        self._rows, self._weights = list(outcome.rows or ()), outcome.weights
        self._constants, self._others, self._merge = constants, others, outcome.merge

    def entries(
        self, name: str, values: Sequence[Mapping[Any, Any]], keys: Iterable[Any]
    ) -> dict[Any, Any]:
        return {key: self.join(f"{name}[{key!r}]", [x.get(key) for x in values]) for key in keys}

    def join(self, name: str, values: Sequence[Any]) -> Any:
        values = [x.item() if isinstance(x, np.generic) else x for x in values]
        first = values[0]
        if all(isinstance(x, Tensor) and x.dim() for x in values):
            return self._merge(values)
        if all(isinstance(x, np.ndarray) and x.ndim for x in values):
            if first.dtype.kind not in "biufc":
                return np.asarray(self._merge(list(map(list, values))))
            return self._merge(list(map(torch.as_tensor, values))).numpy()
        if all(dtypes := set(map(_dtype_of, values))):
            if any(dtype.is_floating_point or dtype.is_complex for dtype in dtypes if dtype):
                return mean_of(values, self._weights)
            return sum(values) if self._are_counts(name, values) else first
        if any(type(x) is not type(first) for x in values) or isinstance(first, Tensor):
            return values
        if isinstance(first, Mapping):
            return self.entries(name, values, dict.fromkeys(chain(*values)))
        if isinstance(first, list | tuple) and any(values):
            return self._join_sequences(name, values)
        return first if all((x == first) is True for x in values) else values

    def _are_counts(self, name: str, values: Sequence[Any]) -> bool:
        """Return True if integers are to be added: all but those that are the same everywhere."""
        first = values[0]
        if isinstance(first, Tensor) or any(x != first for x in values):
            return True
        constant = first in self._constants
        if not constant:
            self._others.add(name)
        if values == self._rows:  # which a number of the batch is, too, in one of them
            return name in self._others
        if len(values) > 1 and not constant:
            rank_zero_warn(
                "a count that training_step returns must be a tensor: got an integer, the same for "
                f"all micro-batches, in {name}, which is taken as the same for the batch. Write "
                "torch.tensor(count), and the sum over the micro-batches is returned."
            )
        return False

    def _join_sequences(self, name: str, values: Sequence[Any]) -> Any:
        first, kind = values[0], type(values[0])
        lengths = [len(x) for x in values]
        by_row = all(isinstance(entry, str) for entry in first)
        by_row = by_row or (kind is list and not all(map(_have_rows, values, lengths)))
        if by_row and lengths == self._rows:
            return kind(self._merge(list(map(list, values))))
        if len(set(lengths)) > 1:
            return kind(chain(*values))
        entries = self.entries(name, [dict(enumerate(x)) for x in values], range(len(first)))
        return kind(*entries.values()) if hasattr(first, "_fields") else kind(entries.values())


def _dtype_of(value: Any) -> torch.dtype | None:
    if isinstance(value, Tensor) and not value.dim() and value.dtype is not torch.bool:
        return value.dtype
    return {float: torch.float64, int: torch.int64}.get(type(value))


def _have_rows(values: Iterable[Any], rows: int) -> bool:
    return all(isinstance(x, Tensor) and x.dim() and len(x) == rows for x in values)
