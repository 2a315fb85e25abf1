"""The arguments of a call: their leaves, and which tensors among them have rows.

Masks, positions and settings come beside the hidden states, and nothing but the shape says which of
them micro-batches need whole. A tensor whose dim 0 is the number of rows is cut; one of another
size, or marked by ``whole``, is passed as it is. A multiple of the number of rows may be either:
``(rows * heads, 1, length)`` has several entries per row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from typing import Any

from torch import Tensor

from lightning_gpipe.core.layout import is_user_object
from lightning_gpipe.core.programs import Value

Path = tuple[Any, ...]  # keys and indices, from the outermost inwards
Reading = int  # how many entries of dim 0 belong to a row; 0 for a tensor that is not cut
WHOLE: Reading = 0


def leaves_in(tree: Any) -> list[tuple[Path, Any]]:
    """Return every leaf in tuples, lists and dicts, with its path."""
    return Arguments(tree).leaves


def map_leaves(function: Callable[[Path, Any], Any], tree: Any) -> Any:
    """Return the tree with ``function(path, leaf)`` for each leaf."""
    return _rebuild(tree, iter([function(path, leaf) for path, leaf in leaves_in(tree)]))


class Arguments:
    """The arguments of a call, ``(args, kwargs)``: their leaves with their paths, and structure."""

    def __init__(self, tree: Any) -> None:
        self.tree = tree
        self.leaves: list[tuple[Path, Any]] = []
        nodes: list[Hashable] = []
        _collect(tree, (), self.leaves, nodes)
        self.structure = tuple(nodes)

    def same_containers(self) -> bool:
        now = Arguments(self.tree)
        pairs = zip(self.leaves, now.leaves, strict=False)
        return self.structure == now.structure and all(x is y for (_, x), (_, y) in pairs)

    @property
    def objects(self) -> list[tuple[Path, Any]]:
        """The leaves that are objects of a user's class, with their paths."""
        return [
            (path, leaf)
            for path, leaf in self.leaves
            if type(leaf) not in _LEAVES and is_user_object(leaf)
        ]

    def with_leaves(self, leaves: Iterable[Any]) -> Any:
        return _rebuild(self.tree, iter(leaves))


def reads_as_rows(tensor: Tensor, rows: int) -> bool:
    """Return whether dim 0 may be the rows, or several entries for each."""
    shape = tensor.shape
    return len(shape) > 0 and shape[0] > 1 and shape[0] % rows == 0


def first_reading(tensor: Tensor, rows: int, sizes: Collection[int]) -> Reading:
    """Return the first reading to try of a tensor that has two, by the sizes of other dims.

    A table has as many entries as a dim of an argument, other than the first.
    """
    entries = tensor.size(0) // rows
    return WHOLE if entries > 1 and tensor.size(0) in sizes else entries


def title(path: Path, names: tuple[str, ...] = ()) -> str:
    """Return a path as the user wrote it: ``attention_mask``, or ``position_embeddings[0]``."""
    kind, key, *rest = path
    if kind == 0 and key < len(names):
        key = names[key]
    first = f"argument {key}" if isinstance(key, int) else str(key)
    # Fields of an object, and the paths within them, are named already: see named_leaves().
    return first + "".join(
        each if str(each).startswith((".", "[")) else f"[{each!r}]" for each in rest
    )


def _rebuild(tree: Any, leaves: Iterator[Any]) -> Any:
    kind = type(tree)
    if kind is dict:
        return {key: _rebuild(value, leaves) for key, value in tree.items()}
    if kind is tuple or kind is list:
        return kind([_rebuild(item, leaves) for item in tree])
    if kind not in _LEAVES and is_named(tree):
        return kind(*(_rebuild(item, leaves) for item in tree))
    return next(leaves)


def _collect(tree: Any, path: Path, leaves: list[tuple[Path, Any]], nodes: list[Hashable]) -> None:
    # Not a generator: every call of a block collects its leaves.
    kind = type(tree)
    if kind is dict:
        nodes.append(tuple(tree))
        for key, value in tree.items():
            _collect(value, (*path, key), leaves, nodes)
    elif kind is tuple or kind is list or (kind not in _LEAVES and is_named(tree)):
        nodes.append((kind, len(tree)))
        for k, item in enumerate(tree):
            _collect(item, (*path, k), leaves, nodes)
    else:
        nodes.append(None)
        leaves.append((path, tree))


def is_named(tree: Any) -> bool:
    """Return whether it is a named tuple; a torch.Size is a tuple that is not made like one."""
    return isinstance(tree, tuple) and hasattr(type(tree), "_fields") and type(tree) is not Value


_LEAVES = frozenset({Tensor, Value, bool, int, float, str, type(None)})  # the most frequent ones
