"""The arguments of a call: their leaves, and which tensors among them have rows.

A block is called with the mini-batch's hidden states, and with masks, positions and settings beside
them. Micro-batches need the rows of some tensors and all of others, and nothing but the shape tells
them apart. A tensor whose dim 0 is the number of rows is cut; one of another size, or marked by
``whole``, is given to each micro-batch as it is. A multiple of the number of rows may be either:
``(rows * heads, 1, length)`` has several entries per row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from lightning_gpipe.core.data import is_whole
from lightning_gpipe.core.plan import Value, is_own

Path = tuple[Any, ...]  # keys and indices, from the outermost inwards
Reading = int  # how many entries of dim 0 belong to a row; 0 for a tensor that is not cut
WHOLE: Reading = 0


def leaves_in(tree: Any) -> list[tuple[Path, Any]]:
    """Every leaf in tuples, lists and dicts, with its path."""
    found: list[tuple[Path, Any]] = []
    _collect(tree, (), found, [])
    return found


def mapped(function: Callable[[Path, Any], Any], tree: Any) -> Any:
    """The tree with ``function(path, leaf)`` for each leaf."""
    return _rebuilt(tree, iter([function(path, leaf) for path, leaf in leaves_in(tree)]))


class Arguments:
    """What a call is given.

    Args:
        tree: ``(args, kwargs)``.

    Attributes:
        tree: As given.
        leaves: Its leaves, with their paths.
        structure: Equal for trees whose leaves are in equal places of equal containers.
    """

    def __init__(self, tree: Any) -> None:
        self.tree = tree
        self.leaves: list[tuple[Path, Any]] = []
        nodes: list[Hashable] = []
        _collect(tree, (), self.leaves, nodes)
        self.structure = tuple(nodes)

    @property
    def objects(self) -> list[tuple[Path, Any]]:
        """Objects of a user's class among them."""
        return [each for each in self.leaves if type(each[1]) not in _LEAVES and is_own(each[1])]

    def replaced(self, leaves: Iterable[Any]) -> Any:
        """The tree with other leaves, in order."""
        return _rebuilt(self.tree, iter(leaves))


def reading_of(tensor: Tensor, rows: int, learned: Reading | None) -> Reading | None:
    """How a tensor is cut; None if that must be found out.

    Args:
        tensor: An argument that does not come from a block.
        rows: The number of rows of the mini-batch, more than one.
        learned: What an earlier call with another tensor there was found to need.
    """
    if not reads_as_rows(tensor, rows):
        return WHOLE
    if is_whole(tensor) or isinstance(tensor, nn.Parameter):
        return WHOLE
    return learned if learned in (WHOLE, tensor.size(0) // rows) else None


def reads_as_rows(tensor: Tensor, rows: int) -> bool:
    """Whether dim 0 may be the rows, or several entries for each."""
    shape = tensor.shape
    return len(shape) > 0 and shape[0] > 1 and shape[0] % rows == 0


def first_reading(tensor: Tensor, rows: int, sizes: Collection[int]) -> Reading:
    """The first reading to try of a tensor that has several.

    Args:
        tensor: The tensor.
        rows: The number of rows of the mini-batch.
        sizes: Those of the other dims of all arguments: a table has as many entries as one of them.
    """
    cut = tensor.size(0) // rows
    return WHOLE if cut > 1 and tensor.size(0) in sizes else cut


def other_reading(tensor: Tensor, rows: int, first: Reading) -> Reading:
    """The second."""
    return tensor.size(0) // rows if first == WHOLE else WHOLE


def title(path: Path, names: tuple[str, ...] = ()) -> str:
    """A path as the user wrote it: ``attention_mask``, or ``position_embeddings[0]``.

    Args:
        path: The path in ``(args, kwargs)``.
        names: The names of the positional parameters.
    """
    kind, key, *rest = path
    if kind == 0 and key < len(names):
        key = names[key]
    first = f"argument {key}" if isinstance(key, int) else str(key)
    # Fields of an object, and what is in them, have their names as the user writes them.
    named = (str(each).startswith((".", "[")) for each in rest)
    return first + "".join(
        each if is_named else f"[{each!r}]" for each, is_named in zip(rest, named, strict=True)
    )


def _rebuilt(tree: Any, leaves: Iterator[Any]) -> Any:
    kind = type(tree)
    if kind is dict:
        return {key: _rebuilt(each, leaves) for key, each in tree.items()}
    if kind is tuple or kind is list:
        return kind([_rebuilt(each, leaves) for each in tree])
    if kind not in _LEAVES and is_named(tree):
        return kind(*(_rebuilt(each, leaves) for each in tree))
    return next(leaves)


def _collect(tree: Any, path: Path, leaves: list[tuple[Path, Any]], nodes: list[Hashable]) -> None:
    # Not a generator: every call of a block collects its leaves.
    kind = type(tree)
    if kind is dict:
        nodes.append(tuple(tree))
        for key, each in tree.items():
            _collect(each, (*path, key), leaves, nodes)
    elif kind is tuple or kind is list or (kind not in _LEAVES and is_named(tree)):
        nodes.append((kind, len(tree)))
        for k, each in enumerate(tree):
            _collect(each, (*path, k), leaves, nodes)
    else:
        nodes.append(None)
        leaves.append((path, tree))


def is_named(tree: Any) -> bool:
    """Whether it is a named tuple; a size is a tuple that is not made like one."""
    return isinstance(tree, tuple) and hasattr(type(tree), "_fields") and type(tree) is not Value


_LEAVES = frozenset({Tensor, Value, bool, int, float, str, type(None)})  # the most frequent ones
