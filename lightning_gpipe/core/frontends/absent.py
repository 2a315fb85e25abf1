"""Parameters and buffers whose values another process has, on the meta device in this one.

PyTorch lets many operators mix them with tensors that have values, and then returns memory that
nobody has written, or changes nothing: ``x @ weight``, ``total.add_(weight.sum())``. Here these
raise. What is computed from such tensors alone is on the meta device as well, and as careful.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.utils._pytree import tree_leaves, tree_map_only

# These read no values of their other arguments, or take gradients of some and not of others.
_HARMLESS = frozenset(
    [
        "backward",
        "grad",
        "expand_as",
        "reshape_as",
        "view_as",
        "sum_to_size",
        "result_type",
        "__set__",
    ]
)
_SHARED = frozenset({"grad", "_base"})  # attributes that are tensors of their own


def careful(cls: type, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
    """Call a function of PyTorch with tensors of another process among its arguments.

    It is the ``__torch_function__`` of their classes. Raises a RuntimeError if it would mix them
    with tensors that have values.
    """
    name = getattr(func, "__name__", "")
    several = len(args) > 1 or kwargs
    with DisableTorchFunctionSubclass():
        mixed = several and name not in _HARMLESS and _mixed(name, args, kwargs)
        if mixed and _writes_to_values(name, args):
            _refuse(name)
        result = func(*args, **(kwargs or {}))
        if mixed and (name == "equal" or any(not each.is_meta for each in _tensors(result))):
            _refuse(name)
        if isinstance(result, Tensor):
            own = name == "__get__" and func.__self__.__name__ in _SHARED
            return result if own else _absent(result)
        return tree_map_only(Tensor, _absent, result) if type(result) in (list, tuple) else result


def _mixed(name: str, args: Sequence[Any], kwargs: Any) -> bool:
    """Return True if tensors with and without values come together, in a list of them by pairs."""
    if name.startswith("_foreach_"):
        lists = [each for each in args if isinstance(each, (list, tuple))]
        return any(_differ(pair) for pair in zip(*lists, strict=False))
    return _differ(_tensors((args, kwargs)))


def _writes_to_values(name: str, args: Sequence[Any]) -> bool:
    in_place = name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
    return in_place and any(not each.is_meta for each in _tensors(args[0]))


def _differ(tensors: Sequence[Any]) -> bool:
    return len({each.is_meta for each in tensors if isinstance(each, Tensor)}) == 2


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor)]


def _absent(result: Tensor) -> Tensor:
    is_plain = type(result) is Tensor and result.is_meta
    return result.as_subclass(AbsentTensor) if is_plain else result


def _refuse(name: str) -> NoReturn:
    raise RuntimeError(
        f"{name} must not use a tensor of another process beside one with values: got one on the "
        "meta device, so the result would be wrong, or nothing would change. Leave out tensors "
        "that are is_meta, or let the process compute it that has them."
    )


class AbsentTensor(Tensor):
    """A buffer of another process, or what is computed from its tensors."""

    __torch_function__: Any = classmethod(careful)
