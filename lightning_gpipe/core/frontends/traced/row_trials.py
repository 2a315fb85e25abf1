"""Checks of steps across the rows that need tensors: of dims that count from the end, and trials.

A function that no rule tells of is tried when a stage first calls it with several rows: the last
one by itself, and the others without it, must give what they give together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gpipe.core.data import tree_flatten
from lightning_gpipe.core.faithful import RandomState
from lightning_gpipe.core.frontends.traced.traced_call import across_rows

_PARTS = slice(-1), slice(-1, None)
_CLOSE = 1e-3  # beside the largest element: other rows may be computed by another kernel


def run_apart(
    run: Callable[..., Any],
    rows: int,
    others: Sequence[int],
    line: str,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run a function whose first argument must have its rows in another dim than ``others``."""
    value = [*args, *kwargs.values()][0]
    value = value[0] if isinstance(value, list | tuple) else value
    if isinstance(value, Tensor) and value.dim():
        same = [k for k in others if (k - rows) % value.dim() == 0]
        if same:
            raise across_rows(line, f"has the rows in dim {same[0]} of {value.dim()}")
    return run(*args, **kwargs)


def tried(run: Callable[..., Any], cut: Sequence[bool], line: str) -> Callable[..., Any]:
    """Return a function that runs another one, which it tries at its first call with two rows.

    ``cut`` says which arguments have their rows in dim 0; those of one may be several for a row.
    """
    waits = True

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal waits
        tensors = [x for x, rows in zip(args, cut, strict=True) if rows]
        if waits and all(isinstance(x, Tensor) and x.dim() and len(x) > 1 for x in tensors):
            equal = len(set(map(len, tensors))) == 1  # else it is not known how to take a row
            if equal and _mixes(run, cut, args, kwargs):
                raise across_rows(line, "gives the same rows other results beside others")
            waits = False
        return run(*args, **kwargs)

    return call


@torch.no_grad()
def _mixes(run: Callable[..., Any], cut: Sequence[bool], args: Sequence[Any], kwargs: Any) -> bool:
    state = RandomState.capture()
    whole = tree_flatten(run(*args, **kwargs)).leaves
    if state.differences():  # it draws, and cannot be compared
        state.restore()
        return False
    m = len(args[cut.index(True)])
    for rows in _PARTS:
        few = [x[rows] if has_rows else x for x, has_rows in zip(args, cut, strict=True)]
        try:
            part = tree_flatten(run(*few, **kwargs)).leaves
        except Exception:
            return True
        for x, y in zip(whole, part, strict=True):
            if isinstance(x, Tensor) and x.dim() and not _same(x[rows] if len(x) == m else x, y):
                return True
    return False


def _same(whole: Tensor, part: Tensor) -> bool:
    """Return whether two results are the same up to rounding."""
    if whole.shape != part.shape:
        return False
    if not whole.is_floating_point():
        return torch.equal(whole, part)
    largest = whole.abs().amax().nan_to_num().item() if whole.numel() else 0.0
    return torch.allclose(whole, part, _CLOSE, _CLOSE * largest, equal_nan=True)
