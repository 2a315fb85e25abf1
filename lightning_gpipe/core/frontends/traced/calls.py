"""The kinds of call of a module: which of its arguments are tensors, and what the others are.

A graph is traced for one kind of call: a tensor is a value in it, and everything else a constant.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from lightning_gpipe.core.data import FlatTree, holds_tensor, is_whole, tree_flatten, tree_unflatten
from lightning_gpipe.core.frontends.traced.values import Kind


@dataclass(frozen=True)
class Given:
    """In the place of an argument that is a value of the graph.

    Attributes:
        kind: What it is.
        whole: Whether every micro-batch gets it whole.
        certain: Whether the kind is more than an assumption.
    """

    kind: Kind
    whole: bool = False
    certain: bool = True


class CallKind:
    """The structure of arguments, and those that are constants.

    Args:
        args, kwargs: Arguments; with :class:`Given` for those that are values.
    """

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self._leaves, self._spec = tree_flatten((tuple(args), kwargs))

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[CallKind, list[Tensor]]:
        """The kind of a call with these arguments, and the tensors that are its values."""
        kind = cls(args, kwargs)
        tensors = [leaf for leaf in kind._leaves if isinstance(leaf, Tensor)]
        kind._leaves = [
            Given(Kind.TENSOR, is_whole(leaf)) if isinstance(leaf, Tensor) else leaf
            for leaf in kind._leaves
        ]
        return kind, tensors

    @classmethod
    def plain(cls, forward: Callable[..., Any]) -> CallKind:
        """A call with the arguments that ``forward`` must have, and no others."""
        parameters = inspect.signature(forward).parameters.values()
        required = [each for each in parameters if each.default is each.empty]
        return cls(
            [_expected(each) for each in required if each.kind in _POSITIONAL],
            {each.name: _expected(each) for each in required if each.kind is each.KEYWORD_ONLY},
        )

    @property
    def given(self) -> list[Given]:
        """The arguments that are values, in order."""
        return [leaf for leaf in self._leaves if isinstance(leaf, Given)]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, CallKind)
            and self._spec == other._spec
            and all(map(_equal, self._leaves, other._leaves))
        )

    def __hash__(self) -> int:
        return hash(tuple(map(type, self._leaves)))

    def call(self, forward: Callable[..., Any], values: Sequence[Any]) -> Any:
        """Call ``forward`` with ``values`` for the arguments that are values."""
        rest = iter(values)
        leaves = [next(rest) if isinstance(leaf, Given) else leaf for leaf in self._leaves]
        args, kwargs = tree_unflatten(FlatTree(leaves, self._spec))
        return forward(*args, **kwargs)


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def check_constants(args: Sequence[Any], kwargs: dict[str, Any], tensors: Sequence[Tensor]) -> None:
    """Refuse lists and arrays with an entry for each row, which would go to every micro-batch.

    Args:
        args, kwargs: The arguments of a call.
        tensors: The tensors among them.

    Raises:
        ValueError: Names the argument.
    """
    rows = {x.size(0) for x in tensors if x.dim() and not is_whole(x)} - {1}
    for name, value in [*enumerate(args), *kwargs.items()]:
        listed = isinstance(value, list | np.ndarray) or (
            isinstance(value, tuple) and all(isinstance(each, str) for each in value)
        )
        if listed and len(value) in rows and not is_whole(value) and not holds_tensor(value):
            raise ValueError(
                "an argument of a traced forward must be a tensor to be cut into micro-batches: "
                f"got {type(value).__name__} with an entry for each of the {len(value)} rows as "
                f"argument {name!r}. Pass a tensor, or write whole(...), from lightning_gpipe, if "
                "every micro-batch needs all of it."
            )


def _expected(parameter: inspect.Parameter) -> Given:
    """What a caller will give for a parameter."""
    is_tensor = parameter.annotation in (parameter.empty, Tensor, "Tensor", "torch.Tensor")
    return Given(Kind.TENSOR if is_tensor else Kind.UNKNOWN, certain=False)


def _equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    plain = isinstance(one, Given | bool | int | float | complex | str | bytes)
    return one is other or (plain and one == other)
