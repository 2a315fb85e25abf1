"""Operators that a user's forward applies to placeholders between two blocks; run in the stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_gpipe.core.frontends.module_list.rehearsal.rehearsal import Trial
from lightning_gpipe.core.frontends.module_list.tape.calls import Knowledge, TensorLeaf
from lightning_gpipe.core.frontends.traced.symbolic import IN_PLACE, set_item

_NEEDS_VALUE = "needs a value"
EDITS_OUTSIDE = "edits a tensor in place that was made outside of the blocks"
EDITS_EARLIER = "edits a tensor in place that an earlier stage has"

_VIEWS = frozenset({Tensor.view, Tensor.reshape, torch.reshape})
_IN_PLACE = frozenset(f"__{name}__" for name in (*IN_PLACE.split(), "setitem"))


class NotRecordable(RuntimeError):
    """Raised for an operation that cannot be recorded."""


def title(func: Callable[..., Any]) -> str:
    """Return the name of an operator, as the user knows it."""
    name = getattr(func, "__name__", str(func))
    if name == "__get__":  # of an attribute
        return f"tensor.{getattr(getattr(func, '__self__', None), '__name__', 'attribute')}"
    return f"{name}()"


def in_place(func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the tensor that an operator edits in place, if it does."""
    if isinstance(kwargs.get("out"), Tensor):
        return kwargs["out"]
    if func is F.batch_norm and kwargs.get("training"):
        return args[1]  # running statistics, whose edits no version counts
    name = getattr(func, "__name__", "")
    edits = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    return args[0] if edits and args and isinstance(args[0], Tensor) else None


def returning(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return the operator, or one that returns the tensor that it edits."""
    return set_item if getattr(func, "__name__", "") == "__setitem__" else func


def for_any_rows(func: Callable[..., Any], args: tuple[Any, ...], rows: int) -> tuple[Any, ...]:
    """Return the arguments of a view that begins with the number of rows with that left open."""
    sizes = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
    numbers = [x for x in sizes if type(x) is int]
    if func not in _VIEWS or numbers[:1] != [rows] or len(numbers) < len(sizes):
        return args
    x, inner = args[0], numbers[1:]
    if -1 in inner:
        inner[inner.index(-1)] = x.numel() // (rows * -math.prod(inner))
    return x, [-1, *inner]


def objection(knowledge: Knowledge, trial: Trial) -> str:
    """Return why an operator cannot run in micro-batches; empty if it can."""
    if not all(isinstance(leaf, TensorLeaf) for leaf in knowledge.result.leaves):
        return _NEEDS_VALUE
    if trial.edited_tensors:
        return EDITS_OUTSIDE
    return "computes across the rows of the mini-batch" if trial.mixes else ""


def needs_value(func: Callable[..., Any], line: str) -> NotRecordable:
    """Return the error for an operator that needs the value of a placeholder."""
    return NotRecordable(
        "between two blocks of a pipeline, the values that they return are not known: got "
        f"{title(func)} at {line}, which needs one. Do this in a block, where it runs for each "
        "micro-batch, or after the last block."
    )


def loses_backward(function: str) -> NotRecordable:
    """Return the error for an autograd function, given its call."""
    return NotRecordable(
        "an autograd function must be called in a block of a pipeline, or before the first one or "
        f"after the last: got {function} between two blocks, where the operators of its forward "
        "are recorded, without its backward. Call it in the forward of a block."
    )


def refused(func: Callable[..., Any], line: str, why: str) -> NotRecordable:
    """Return the error for an operator that cannot run in micro-batches."""
    if why == _NEEDS_VALUE:
        return needs_value(func, line)
    return NotRecordable(
        "what the forward does between two blocks must work for each micro-batch in its stage: "
        f"{title(func)} at {line} {why}. Do this in a block, or after the last one."
    )
