"""The arguments of a call: their leaves, and which tensors among them have rows.

A block is called with the mini-batch's hidden states, and with masks, positions and settings beside
them. Micro-batches need the rows of some tensors and all of others, and nothing but the shape tells
them apart. A tensor whose dim 0 is the number of rows is cut; one of another size, or marked by
``whole``, is given to each micro-batch as it is. A multiple of the number of rows may be either:
``(rows * heads, 1, length)`` has several entries per row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from lightning_gpipe.core.data import is_whole
from lightning_gpipe.core.plan import Value

Path = tuple[Any, ...]  # keys and indices, from the outermost inwards
Reading = int  # how many entries of dim 0 belong to a row; 0 for a tensor that is not cut
WHOLE: Reading = 0


def leaves_in(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every leaf in tuples, lists and dicts, with its path."""
    kind = type(tree)
    if kind is dict:
        for key, each in tree.items():
            yield from leaves_in(each, (*path, key))
    elif kind is tuple or kind is list or _is_named(tree):
        for k, each in enumerate(tree):
            yield from leaves_in(each, (*path, k))
    else:
        yield path, tree


def mapped(function: Callable[[Path, Any], Any], tree: Any, path: Path = ()) -> Any:
    """The tree with ``function(path, leaf)`` for each leaf."""
    kind = type(tree)
    if kind is dict:
        return {key: mapped(function, each, (*path, key)) for key, each in tree.items()}
    if kind is tuple or kind is list:
        return kind([mapped(function, each, (*path, k)) for k, each in enumerate(tree)])
    if _is_named(tree):
        return kind(*(mapped(function, each, (*path, k)) for k, each in enumerate(tree)))
    return function(path, tree)


def reading_of(tensor: Tensor, rows: int, learned: Reading | None) -> Reading | None:
    """How a tensor is cut; None if that must be found out.

    Args:
        tensor: An argument that does not come from a block.
        rows: The number of rows of the mini-batch, more than one.
        learned: What an earlier call with another tensor there was found to need.
    """
    if tensor.dim() == 0 or is_whole(tensor) or isinstance(tensor, nn.Parameter):
        return WHOLE
    size = tensor.size(0)
    if size <= 1 or size % rows:
        return WHOLE
    return learned if learned in (WHOLE, size // rows) else None


def default_reading(tensor: Tensor, rows: int) -> Reading:
    """The first reading to try of a tensor that has several."""
    return 1 if tensor.size(0) == rows else WHOLE


def other_reading(tensor: Tensor, rows: int) -> Reading:
    """The second."""
    return WHOLE if tensor.size(0) == rows else tensor.size(0) // rows


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
    return first + "".join(f"[{each!r}]" for each in rest)


def _is_named(tree: Any) -> bool:
    """Whether it is a named tuple; a size is a tuple that is not made like one."""
    return isinstance(tree, tuple) and hasattr(type(tree), "_fields") and type(tree) is not Value
