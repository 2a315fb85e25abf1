"""What a user's forward does with placeholders between two blocks: operators, run in the stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lightning_gpipe.core.frontends.module_list.arguments import leaves_in
from lightning_gpipe.core.frontends.module_list.calls import Learned
from lightning_gpipe.core.frontends.module_list.rehearsal import Try
from lightning_gpipe.core.frontends.module_list.results import TensorLeaf

NEEDS_VALUE = "needs a value"
EDITS_OUTSIDE = "edits a tensor in place that was made outside of the blocks"

_IN_PLACE = frozenset(
    f"__i{name}__"
    for name in ("add", "and", "floordiv", "lshift", "matmul", "mod", "mul", "or", "pow", "rshift")
) | {"__isub__", "__itruediv__", "__ixor__"}


def title(func: Callable[..., Any]) -> str:
    """What the user knows an operator as."""
    name = getattr(func, "__name__", str(func))
    if name == "__get__":  # of an attribute
        return f"tensor.{getattr(getattr(func, '__self__', None), '__name__', 'attribute')}"
    return f"{name}()"


def in_place(func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
    """The tensor that an operator edits in place, if it does."""
    if isinstance(kwargs.get("out"), Tensor):
        return kwargs["out"]
    name = getattr(func, "__name__", "")
    edits = name in _IN_PLACE or name == "__setitem__"
    edits = edits or (name.endswith("_") and not name.endswith("__"))
    return args[0] if edits and args and isinstance(args[0], Tensor) else None


def returning(func: Callable[..., Any]) -> Callable[..., Any]:
    """The operator, which returns what it edits."""
    return _set_item if getattr(func, "__name__", "") == "__setitem__" else func


def objection(learned: Learned, found: Try, given: Any, rows: int, few: int | None) -> str:
    """Why an operator cannot run in micro-batches; empty if it can.

    Args:
        learned: What was learned of it.
        found: What it returned for a few rows.
        given: Its ``(args, kwargs)``.
        rows: The number of rows of the mini-batch.
        few: How many were tried; None for all.
    """
    if not all(isinstance(leaf, TensorLeaf) for leaf in learned.result.leaves):
        return NEEDS_VALUE
    if found.edited:
        return EDITS_OUTSIDE
    if few is None:
        return ""
    results = [x for _, x in leaves_in(found.result) if isinstance(x, Tensor) and x.dim()]
    numbers = [x for _, x in leaves_in(given) if type(x) is int]
    if rows in numbers and any(x.size(0) == rows for x in results):
        return f"has the number of rows, {rows}, for a number"
    return ""


def _set_item(tensor: Tensor, index: Any, value: Any) -> Tensor:
    tensor[index] = value
    return tensor
