"""A call in a traced forward, the dims of the rows in its arguments, and checks that need tensors.

The checks are of dims that count from the end, and trials: when a stage first calls a function
without a rule with several rows, the last row by itself, and the others without it, must give what
they give together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from lightning_gpipe.core.data import tree_flatten
from lightning_gpipe.core.faithful import RandomState
from lightning_gpipe.core.frontends.traced.call_graph import UnsupportedForward
from lightning_gpipe.core.frontends.traced.symbolic import function_name


def across_rows(line: str, what: str) -> UnsupportedForward:
    """Return the error of a step that computes across rows."""
    return UnsupportedForward(
        "a forward must not compute across the rows of a mini-batch, since a stage has those of a "
        f"micro-batch: {line} {what}. Compute it outside of the model; or, if each micro-batch may "
        "count for itself, in a module of its own, which runs as one layer."
    )


class TracedCall:
    """A function or method of a step (empty ``name``: a layer), and its arguments.

    ``rows`` are the dims of the rows in all arguments, ``dim`` that in the first one, or its first
    tensor. ``others`` are dims that count from another end, and must differ from ``dim``.
    ``untold`` is True if no rule tells of it.
    """

    def __init__(self, node: fx.Node, dims: Mapping[fx.Node, int | None]) -> None:
        self.name, self.line = function_name(node), node.meta["line"]
        self.args, self.kwargs = list(node.args), node.kwargs
        self._dims = dims
        self.others: list[int] = []
        self.untold = False
        self.rows = {dims[x] for x in node.all_input_nodes if x in dims} - {None}
        first = self.args[0] if self.args else next(iter(self.kwargs.values()), None)
        within = map(self.of, first if isinstance(first, list | tuple) else [first])
        self.dim = next((dim for dim in within if dim is not None), None)

    def of(self, value: Any) -> int | None:
        return self._dims.get(value) if isinstance(value, fx.Node) else None

    def at(self, position: int, *names: str, default: Any = None) -> Any:
        for name in names:
            if name in self.kwargs:
                return self.kwargs[name]
        return self.args[position] if position < len(self.args) else default

    def differs(self, *dims: Any) -> bool:
        """Return whether the rows are in none of these dims, which a stage may have to check."""
        assert self.dim is not None, "rules are for rows whose dim is known"
        numbers = [k for k in dims if isinstance(k, int)]
        self.others += [k for k in numbers if (k < 0) != (self.dim < 0)]
        return self.dim not in numbers

    def sizes(self, name: str) -> Sequence[Any]:
        rest = self.args[1:] or [self.kwargs.get(name, ())]
        return rest[0] if len(rest) == 1 and isinstance(rest[0], list | tuple) else rest


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
    if whole.shape != part.shape:
        return False
    if not whole.is_floating_point():
        return torch.equal(whole, part)
    largest = whole.abs().amax().nan_to_num().item() if whole.numel() else 0.0
    return torch.allclose(whole, part, _CLOSE, _CLOSE * largest, equal_nan=True)
