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
from lightning_gpipe.core.frontends.module_list.tape.arguments import (
    Path,
    map_leaves,
    reads_as_rows,
)
from lightning_gpipe.core.frontends.module_list.tape.calls import RecordedCall
from lightning_gpipe.core.frontends.module_list.tape.placeholder import Placeholder


def without_objects(
    call: RecordedCall, arguments: tuple[Any, Any], rows: int | None
) -> tuple[RecordedCall, Any] | None:
    """Return the call without objects that hold placeholders or rows, and its arguments.

    Return None if there are no such objects, or none that can be made again of their parts.
    ``rows`` is None if the mini-batch is not cut.
    """
    objects: list[tuple[Path, type, Any]] = []

    def parts(path: Path, leaf: Any) -> Any:
        spec = _spec(leaf, rows)
        if spec is None:
            return leaf
        objects.append((path, type(leaf), spec))
        return dict(named_leaves(leaf))

    arguments = map_leaves(parts, arguments)
    if not objects:
        return None
    run = _CallWithObjects(call.run, tuple((path, spec) for path, _, spec in objects), call.name)
    types = tuple((path, kind) for path, kind, _ in objects)
    return call._replace(run=run, kind=(call.kind, types)), arguments


def _spec(value: Any, rows: int | None) -> Any:
    """Return the structure of an object that must be cut; None if it is not one."""
    if isinstance(value, Tensor | bool | int | float | str | None):
        return None
    if type(value).__module__.startswith("torch."):
        return None  # a BlockMask has functions of the index of a row in the mini-batch
    try:
        flat = tree_flatten(value)
    except TypeError:  # it holds tensors where nothing can reach them
        return None
    if any(leaf is value for leaf in flat.leaves):
        return None
    return flat.spec if any(_varies(leaf, rows) for leaf in flat.leaves) else None


def _varies(leaf: Any, rows: int | None) -> bool:
    """Return whether micro-batches need other values of a leaf."""
    if isinstance(leaf, Placeholder):
        return True
    cut = isinstance(leaf, Tensor) and rows is not None and not is_whole(leaf)
    return cut and reads_as_rows(leaf, rows or 1)


@dataclass(frozen=True)
class _CallWithObjects:
    """Calls a block with objects that are made of their parts."""

    run: Callable[..., Any]
    specs: tuple[tuple[Path, Any], ...]
    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments: Any = args, kwargs
        objects: list[tuple[Any, list[Any]]] = []
        for path, spec in self.specs:

            def make(parts: dict[str, Any], spec: Any = spec) -> Any:
                leaves = list(parts.values())
                value = tree_unflatten(FlatTree(leaves, spec))
                objects.append((value, leaves))
                return value

            arguments = _replaced(arguments, path, make)
        args, kwargs = arguments
        result = self.run(*args, **kwargs)
        for value, leaves in objects:
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


def _replaced(tree: Any, path: Sequence[Any], change: Callable[[Any], Any]) -> Any:
    """Return the tree with ``change(subtree)`` for the subtree at a path."""
    if not path:
        return change(tree)
    key, rest = path[0], path[1:]
    if type(tree) is dict:
        return {**tree, key: _replaced(tree[key], rest, change)}
    items = list(tree)
    items[key] = _replaced(items[key], rest, change)
    return type(tree)(items) if type(tree) in (tuple, list) else type(tree)(*items)
