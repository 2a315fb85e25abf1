"""The result of a step, joined from those of training_step for its micro-batches.

A value does not say how it depends on the rows, so its type decides: tensors, and lists with an
entry for each row, are concatenated in the order of the batch, floats are averaged, integers are
counts, and structures are joined by entries. Whether a tensor has rows, and an integer is their
number, shows where the same entry comes of several numbers of rows, as in the verification of the
first batch.
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

# The shapes of tensors, and integers as ``(integer,)``, with the rows that they come of, by name.
Sizes = dict[str, set[tuple[int, tuple[int, ...]]]]

_CAPACITY = 64  # shapes of an entry that are noted


def result_of(
    outcome: Outcome,
    constants: Sequence[Any] = (),
    others: set[str] | None = None,
    sizes: Sizes | None = None,
) -> Any:
    """Return the result of a step; ``constants`` are the same for all micro-batches.

    ``others`` gets the names of what was none of them, and ``sizes`` what is noted of each entry;
    both are given again with the next step.
    """
    results = outcome.results
    if outcome.loss is None or not all(isinstance(result, Mapping) for result in results):
        return outcome.loss
    known = {"loss": outcome.loss}
    if LOSS_WEIGHT in results[0]:
        known[LOSS_WEIGHT] = sum(result[LOSS_WEIGHT] for result in results)
    rest = [key for key in dict.fromkeys(chain(*results)) if key not in known]
    joining = _Joining(
        outcome,
        constants,
        set() if others is None else others,
        {} if sizes is None else sizes,
    )
    return known | joining.entries("", results, rest)


def note_sizes(sizes: Sizes, rows: int, value: Any, name: str = "") -> None:
    """Note the shapes and integers in a result of ``training_step`` for so many rows."""
    if isinstance(value, Mapping | list | tuple):
        children = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, child in children:
            note_sizes(sizes, rows, child, f"{name}[{key!r}]")
    elif shape := _shape_of(value):
        _note(sizes, name, rows, shape)


def _note(sizes: Sizes, name: str, rows: int, shape: tuple[int, ...]) -> None:
    known = sizes.setdefault(name, set())
    if len(known) < _CAPACITY:
        known.add((rows, shape))


def _shape_of(value: Any) -> tuple[int, ...]:
    value = value.item() if isinstance(value, np.generic) else value
    if type(value) is int:
        return (value,)
    if isinstance(value, Tensor) and value.is_nested:
        return ()
    return tuple(value.shape) if isinstance(value, Tensor | np.ndarray) else ()


def mean_of(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """Return the weighted mean. The mean of nothing may be no number, and has no weight."""
    pairs = [pair for pair in zip(values, weights, strict=True) if pair[1]]
    pairs = pairs or [(value, 1.0) for value in values]
    first = pairs[0][0]
    if all(type(value) is float and value == first for value, _ in pairs):
        return first  # a constant: its mean would be rounded
    total = sum(weight for _, weight in pairs)
    return sum(value * (weight / total) for value, weight in pairs)


_CURE = (
    "Return a tensor with the rows in dim 0, such as x.transpose(0, 1); numbers of a micro-batch "
    "as tensors without dims, of which floats are averaged and integers added; or log a metric."
)


class _Joining:
    def __init__(
        self, outcome: Outcome, constants: Sequence[Any], others: set[str], sizes: Sizes
    ) -> None:
        self._rows, self._weights = list(outcome.rows or ()), outcome.weights
        self._constants, self._others, self._merge = constants, others, outcome.merge
        self._sizes = sizes

    def entries(
        self, name: str, values: Sequence[Mapping[Any, Any]], keys: Iterable[Any]
    ) -> dict[Any, Any]:
        return {key: self.join(f"{name}[{key!r}]", [x.get(key) for x in values]) for key in keys}

    def join(self, name: str, values: Sequence[Any]) -> Any:
        values = [x.item() if isinstance(x, np.generic) else x for x in values]
        first = values[0]
        if all(isinstance(x, Tensor) and x.dim() for x in values):
            return self._concatenated(name, values)
        if all(isinstance(x, np.ndarray) and x.ndim for x in values):
            if first.dtype.kind not in "biufc":
                return np.asarray(self._merge(list(map(list, values))))
            return self._concatenated(name, list(map(torch.as_tensor, values))).numpy()
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

    def _concatenated(self, name: str, values: Sequence[Tensor]) -> Any:
        shapes = list(map(_shape_of, values))
        try:
            merged = self._merge(values)
        except (RuntimeError, IndexError) as error:
            if isinstance(error, RuntimeError) and len({shape[1:] for shape in shapes}) == 1:
                raise
            raise ValueError(
                "a tensor that training_step returns beside the loss must have the rows of its "
                f"micro-batch in dim 0, and one shape but for them: got shapes {shapes} for "
                f"micro-batches of {self._rows} rows, in {name}. {_CURE}"
            ) from error
        for dim, (size, part) in enumerate(zip(merged.shape, shapes[0], strict=False)):
            if size != part and self._are_no_rows(name, shapes, dim):
                rank_zero_warn(
                    "a tensor that training_step returns beside the loss should have the rows of "
                    f"its micro-batch in dim {dim}: got size {part}, whatever their number is, in "
                    f"{name}. The micro-batches' are concatenated nevertheless. {_CURE}"
                )
        return merged

    def _are_no_rows(self, name: str, shapes: Sequence[tuple[int, ...]], dim: int) -> bool:
        """Return True if the size in ``dim`` is the same for any number of rows, or no multiple."""
        noted = self._noted(name, shapes)
        found = {shape[dim] for _, shape in noted if dim < len(shape)}
        if len(found) != 1:
            return False  # some rows may be left out
        numbers = {rows for rows, _ in noted}
        return len(numbers) > 1 or any(rows and size % rows for rows in numbers for size in found)

    def _noted(self, name: str, shapes: Sequence[tuple[int, ...]]) -> set[Any]:
        for rows, shape in zip(self._rows, shapes, strict=False):
            _note(self._sizes, name, rows, shape)
        return self._sizes.get(name, set())

    def _are_counts(self, name: str, values: Sequence[Any]) -> bool:
        """Return True if integers are to be added: all but those that are the same everywhere."""
        first = values[0]
        if isinstance(first, Tensor) or any(x != first for x in values):
            return True
        constant = first in self._constants
        if not constant:
            self._others.add(name)
        noted = self._noted(name, [(x,) for x in values])
        if values == self._rows and all(shape == (rows,) for rows, shape in noted):
            if len(values) > 1 and len(noted) == 1 and not constant:
                rank_zero_warn(
                    "it must be clear whether an integer that training_step returns is a number of "
                    f"rows: got {first} for all micro-batches, of {first} rows each, in {name}. "
                    "They are added up. Return a tensor, as torch.tensor(count), if that is right; "
                    "leave it out if it is the same for all batches."
                )
            return name in self._others  # a number of the batch is as large, too, in one of them
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
