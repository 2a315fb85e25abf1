"""Arguments that are objects with rows, such as a dataclass of masks: cut as the trees they are.

The object is taken apart before the call is recorded, and made again of its parts in the stage::

    block(x, masks=Masks(causal, padding))      # what the forward calls
    block(x, masks={".causal": ..., ".padding": ...})    # what is recorded
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_gpipe.core.data import FlatTree, is_whole, named_leaves, tree_flatten, tree_unflatten
from lightning_gpipe.core.frontends.module_list.arguments import Path, leaves_in, reads_as_rows
from lightning_gpipe.core.frontends.module_list.calls import Call
from lightning_gpipe.core.frontends.module_list.placeholder import Placeholder


def taken_apart(call: Call, given: tuple[Any, Any], rows: int | None) -> tuple[Call, Any] | None:
    """The call without objects that hold results of blocks or rows, and its arguments.

    Args:
        call: The call.
        given: Its ``(args, kwargs)``.
        rows: The number of rows; None if the mini-batch is not cut.

    Returns:
        None if there are no such objects, or none that can be made again of their parts.
    """
    parts = {path: _Parts.of(leaf, rows) for path, leaf in leaves_in(given)}
    found = {path: each for path, each in parts.items() if each is not None}
    if not found:
        return None
    for path, each in found.items():
        given = _with(given, path, each.as_dict)
    made = _Making(call.run, tuple((path, each.spec) for path, each in found.items()), call.name)
    kinds = tuple((path, each.kind) for path, each in found.items())
    return call._replace(run=made, kind=(call.kind, kinds)), given


@dataclass(frozen=True)
class _Parts:
    """What an object is made of."""

    kind: Any
    leaves: Sequence[tuple[str, Any]]
    spec: Any

    def as_dict(self, _: Any) -> dict[str, Any]:
        return dict(self.leaves)

    @classmethod
    def of(cls, value: Any, rows: int | None) -> _Parts | None:
        if isinstance(value, Tensor | bool | int | float | str | None):
            return None
        if type(value).__module__.startswith("torch."):
            return None  # a BlockMask has functions of the index of a row in the mini-batch
        try:
            flat = tree_flatten(value)
        except TypeError:  # it holds tensors where nothing can reach them
            return None
        if any(each is value for each in flat.leaves):
            return None
        if not any(_varies(each, rows) for each in flat.leaves):
            return None
        return cls(type(value), named_leaves(value), flat.spec)


def _varies(leaf: Any, rows: int | None) -> bool:
    """Whether micro-batches need other values of a leaf."""
    if isinstance(leaf, Placeholder):
        return True
    cut = isinstance(leaf, Tensor) and rows is not None and not is_whole(leaf)
    return cut and reads_as_rows(leaf, rows or 1)


@dataclass(frozen=True)
class _Making:
    """Calls a block with objects that are made of their parts."""

    run: Callable[..., Any]
    specs: tuple[tuple[Path, Any], ...]
    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given: Any = args, kwargs
        made: list[tuple[Any, list[Any]]] = []

        for path, spec in self.specs:

            def make(parts: dict[str, Any], spec: Any = spec) -> Any:
                leaves = list(parts.values())
                value = tree_unflatten(FlatTree(leaves, spec))
                made.append((value, leaves))
                return value

            given = _with(given, path, make)
        args, kwargs = given
        result = self.run(*args, **kwargs)
        for value, leaves in made:
            self._check_unchanged(value, leaves)
        return result

    def _check_unchanged(self, value: Any, leaves: Sequence[Any]) -> None:
        now = tree_flatten(value).leaves
        if len(now) != len(leaves) or any(x is not y for x, y in zip(now, leaves, strict=True)):
            raise RuntimeError(
                f"blocks must not change an object with rows that they are given: {self.name} "
                f"changed a {type(value).__name__}, which was made for one micro-batch. Return the "
                "new values."
            )


def _with(tree: Any, path: Sequence[Any], change: Callable[[Any], Any]) -> Any:
    """The tree with what is at a path changed."""
    if not path:
        return change(tree)
    key, rest = path[0], path[1:]
    if type(tree) is dict:
        return {**tree, key: _with(tree[key], rest, change)}
    items = list(tree)
    items[key] = _with(items[key], rest, change)
    return type(tree)(items) if type(tree) in (tuple, list) else type(tree)(*items)
