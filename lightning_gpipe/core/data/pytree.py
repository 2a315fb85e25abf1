"""Nested inputs and outputs as flat lists of leaves, and back.

A thin door to ``torch.utils._pytree``: what the rest of the package knows of it stands here.

PyTorch's trees are tuples, lists, dicts and what was registered. Anything else is a leaf to it, the
tensors within included, and those would go their own way: uncut to every micro-batch, and with
their graph from one stage into another. So dataclasses are taken apart here too, and any other
object that holds tensors is refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree

from lightning_gpipe.core.data.marks import copy_marks

LONE = _pytree.tree_flatten(None)[1]  # of a tree that is a leaf, as most are: a tensor


class FlatTree(NamedTuple):
    """A tree taken apart: its leaves in order, and the structure that held them.

    Where only the leaves matter, as with gradients, there is no structure.
    """

    leaves: list[Any]
    spec: _pytree.TreeSpec | None = None

    def detached(self) -> FlatTree:
        """The same with tensors that belong to no graph and require a gradient as these do.

        A tensor that is there twice stays one tensor.
        """
        if len(self.leaves) == 1:
            return FlatTree([_detached(self.leaves[0])], self.spec)
        made = {id(leaf): _detached(leaf) for leaf in self.leaves}
        return FlatTree([made[id(leaf)] for leaf in self.leaves], self.spec)


def tree_flatten(tree: Any) -> FlatTree:
    """Take ``tree`` apart.

    Raises:
        TypeError: If it holds tensors where they cannot be found.
    """
    if type(tree) is Tensor:
        return FlatTree([tree], LONE)
    leaves, spec = _pytree.tree_flatten(tree, is_leaf=_is_closed)
    if any(map(_is_closed, leaves)):
        leaves, spec = _pytree.tree_flatten(_opened(tree), is_leaf=_is_closed)
    for leaf in leaves:
        if not isinstance(leaf, _PLAIN):
            _refuse_hidden_tensors(leaf)
    return FlatTree(leaves, spec)


def tree_unflatten(flat: FlatTree) -> Any:
    """Put a tree together again."""
    if flat.spec is LONE:
        return flat.leaves[0]
    assert flat.spec is not None, "bare leaves make no tree"
    return _pytree.tree_unflatten(flat.leaves, flat.spec)


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """The tree with ``function(tensor)`` in the place of each tensor."""
    return _pytree.tree_map_only(Tensor, function, _opened(tree))


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Every leaf with the path that leads to it, such as ``['mask'][0]``; "" for a lone leaf."""
    leaves, _ = _pytree.tree_flatten_with_path(_opened(tree))
    return [(_pytree.keystr(path), leaf) for path, leaf in leaves]


def entries(tree: Any) -> list[str | int | None]:
    """For every leaf, the key, index or attribute of ``tree`` that leads to it; None if alone."""
    leaves, _ = _pytree.tree_flatten_with_path(_opened(tree))
    return [_name_of(path[0]) if path else None for path, _ in leaves]


def _detached(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.requires_grad:
        return copy_marks(leaf, leaf.detach().requires_grad_(torch.is_grad_enabled()))
    return leaf


def _name_of(key: Any) -> Any:
    match key:
        case _pytree.MappingKey():
            return key.key
        case _pytree.SequenceKey():
            return key.idx
        case _pytree.GetAttrKey():
            return key.name


# Dataclasses.


class _Record:
    """Stands in for a dataclass instance, as a node whose children are the attributes."""

    def __init__(self, cls: type, names: tuple[str, ...], values: list[Any]) -> None:
        self.cls = cls
        self.names = names
        self.values = values


def _is_closed(tree: Any) -> bool:
    """Whether this is a node to PyTorch by accident, or an instance of an unknown dataclass."""
    if isinstance(tree, PackedSequence):
        return True
    known = type(tree) in _pytree.SUPPORTED_NODES or isinstance(tree, type)
    return is_dataclass(tree) and not known


def _opened(tree: Any) -> Any:
    """The tree with a record in the place of each dataclass instance that may hold tensors."""

    def opened(leaf: Any) -> Any:
        if not is_dataclass(leaf) or not _is_closed(leaf):
            return leaf
        attributes = dict(_attributes(leaf))
        if not any(map(_holds_tensor, attributes.values())):
            return leaf
        values = [_opened(value) for value in attributes.values()]
        return _Record(type(leaf), tuple(attributes), values)

    return _pytree.tree_map(opened, tree, is_leaf=_is_closed)


def _from_record(values: Iterable[Any], context: tuple[type, tuple[str, ...]]) -> Any:
    cls, names = context
    instance: Any = object.__new__(cls)  # what the constructor did to the fields is done
    for name, value in zip(names, values, strict=True):
        object.__setattr__(instance, name, value)  # of frozen ones too
    return instance


_pytree.register_pytree_node(
    _Record,
    lambda record: (record.values, (record.cls, record.names)),
    _from_record,
    flatten_with_keys_fn=lambda record: (
        list(zip(map(_pytree.GetAttrKey, record.names), record.values, strict=True)),
        (record.cls, record.names),
    ),
)


# What cannot be taken apart.

_PLAIN = (Tensor, bool, int, float, complex, str, bytes, type(None))


def _refuse_hidden_tensors(leaf: Any) -> None:
    kind = type(leaf).__qualname__
    if isinstance(leaf, PackedSequence):
        raise TypeError(
            "a PackedSequence has no row per sample and cannot pass through a pipeline: pass the "
            "padded tensor and the lengths, and pack them in the layer that needs it."
        )
    if isinstance(leaf, Collection) and _holds_tensor(leaf):
        raise TypeError(
            "tensors on their way through a pipeline must be in plain tuples, lists, dicts or "
            f"dataclasses: got a {kind} that holds one. Pass dict(...), list(...) or tuple(...) "
            "of it, or register the class with torch.utils._pytree.register_pytree_node."
        )
    found = next((name for name, value in _attributes(leaf) if _holds_tensor(value)), None)
    if found is not None:
        raise TypeError(
            "tensors on their way through a pipeline must be in tuples, lists, dicts or "
            f"dataclasses: got a {kind} with one in its attribute {found!r}. Pass the tensors "
            f"themselves and make the {kind} where it is used, or register the class with "
            "torch.utils._pytree.register_pytree_node."
        )


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object has in its ``__dict__`` and its slots."""
    if isinstance(value, type | ModuleType | FunctionType | nn.Module):
        return
    yield from getattr(value, "__dict__", {}).items()
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name) and not name.startswith("__"):
                yield name, getattr(value, name)


def _holds_tensor(value: Any, depth: int = 4) -> bool:
    """Whether a tensor can be reached from ``value`` in so many steps."""
    if isinstance(value, Tensor):
        return True
    if depth == 0 or isinstance(value, _PLAIN):
        return False
    within = [each for _, each in _attributes(value)]
    if isinstance(value, Mapping):
        within += value.values()
    elif isinstance(value, list | tuple | set | frozenset | deque):
        within += value
    return any(_holds_tensor(each, depth - 1) for each in within)
