"""The kinds of call of a module: its tensor arguments, and the others, constants of a graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_gpipe.core.data import (
    FlatTree,
    has_entry_per_row,
    is_whole,
    tree_flatten,
    tree_unflatten,
)
from lightning_gpipe.core.frontends.traced.symbolic import ValueKind


@dataclass(frozen=True)
class Argument:
    """Stands for an argument that is a value; not ``certain`` if its kind is an assumption."""

    kind: ValueKind
    whole: bool = False
    certain: bool = True


class CallKind:
    """The structure of a call's arguments, with an :class:`Argument` for each value.

    ``omitted`` are the parameters that a call with the required arguments alone leaves out.
    """

    omitted: Sequence[str] = ()

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self._leaves, self._spec = tree_flatten((tuple(args), kwargs))

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[CallKind, list[Tensor]]:
        kind = cls(args, kwargs)
        tensors = [leaf for leaf in kind._leaves if isinstance(leaf, Tensor)]
        kind._leaves = [
            Argument(ValueKind.TENSOR, is_whole(leaf)) if isinstance(leaf, Tensor) else leaf
            for leaf in kind._leaves
        ]
        return kind, tensors

    @classmethod
    def required(cls, forward: Callable[..., Any]) -> CallKind:
        parameters = inspect.signature(forward).parameters.values()
        required = [parameter for parameter in parameters if parameter.default is parameter.empty]
        kind = cls(
            [_expected(p) for p in required if p.kind <= p.POSITIONAL_OR_KEYWORD],
            {p.name: _expected(p) for p in required if p.kind is p.KEYWORD_ONLY},
        )
        several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        omitted = [p for p in parameters if p not in required or p.kind in several]
        kind.omitted = [str(p.replace(annotation=p.empty)) for p in omitted]
        return kind

    @property
    def inputs(self) -> list[Argument]:
        return [leaf for leaf in self._leaves if isinstance(leaf, Argument)]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CallKind) or self._spec != other._spec:
            return False
        return all(map(_equal, self._leaves, other._leaves))

    def __hash__(self) -> int:
        return hash(tuple(map(type, self._leaves)))

    def call(self, forward: Callable[..., Any], values: Sequence[Any]) -> Any:
        rest = iter(values)
        leaves = [next(rest) if isinstance(leaf, Argument) else leaf for leaf in self._leaves]
        args, kwargs = tree_unflatten(FlatTree(leaves, self._spec))
        return forward(*args, **kwargs)


def check_constants(args: Sequence[Any], kwargs: dict[str, Any], tensors: Sequence[Tensor]) -> None:
    """Refuse lists and arrays with an entry for each row, which would go to every micro-batch."""
    rows = {x.size(0) for x in tensors if x.dim() and not is_whole(x)} - {1}
    for name, value in [*enumerate(args), *kwargs.items()]:
        if has_entry_per_row(value, rows):
            raise ValueError(
                "an argument of a traced forward must be a tensor to be cut into micro-batches: "
                f"got {type(value).__name__} with an entry for each of the {len(value)} rows as "
                f"argument {name!r}. Pass a tensor, or write whole(...), from lightning_gpipe, if "
                "every micro-batch needs all of it."
            )


def _expected(parameter: inspect.Parameter) -> Argument:
    is_tensor = parameter.annotation in (parameter.empty, Tensor, "Tensor", "torch.Tensor")
    return Argument(ValueKind.TENSOR if is_tensor else ValueKind.UNKNOWN, certain=False)


def _equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    by_value = isinstance(one, Argument | bool | int | float | complex | str | bytes)
    return one is other or (by_value and one == other)
