"""Flattens nested inputs and outputs into lists of leaves, and unflattens them.

PyTorch's pytree takes dataclasses for leaves, whose tensors would neither be split into
micro-batches nor detached between stages. So they are flattened here, and any other object that
holds tensors is refused. This is the only module that uses ``torch.utils._pytree``.
"""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache, partial
from itertools import count
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree

from lightning_gpipe.core.data.marks import WholeList, WholeTuple, copy_marks
from lightning_gpipe.core.data.tensor_search import PLAIN, attributes, holds_tensor, refuse_hidden

T = TypeVar("T")

_NAMED = "namedtuple"
LEAF_SPEC = _pytree.tree_flatten(None)[1]  # the structure of a single leaf, most often a tensor


class JoinedStructure(NamedTuple):
    """The structure of several trees with one list of leaves, see :func:`join`."""

    specs: tuple[Structure | None, ...]
    sizes: tuple[int, ...]


Structure = _pytree.TreeSpec | JoinedStructure


@lru_cache(maxsize=64)
def _of_leaves(n: int) -> JoinedStructure:
    return JoinedStructure((LEAF_SPEC,) * n, (1,) * n)


class FlatTree(NamedTuple):
    """A flattened tree: its leaves in order, and its structure, None if only the leaves matter."""

    leaves: list[Any]
    spec: Structure | None = None

    def detached(self) -> FlatTree:
        """Return the tree with detached tensors, each once, which keep their requires_grad."""
        if len(self.leaves) == 1:
            return _flat(([_detached(self.leaves[0])], self.spec))
        return self._mapped(_detached)

    def aliased(self) -> FlatTree:
        """Return the detached tree with new objects for all tensors that may require a gradient.

        So a layer that calls ``requires_grad_()`` does not change the caller's tensor.
        """
        if len(self.leaves) == 1:
            return _flat(([_aliased(self.leaves[0])], self.spec))
        return self._mapped(_aliased)

    def _mapped(self, function: Callable[[Any], Any]) -> FlatTree:
        mapped = {id(leaf): function(leaf) for leaf in self.leaves}
        return FlatTree([mapped[id(leaf)] for leaf in self.leaves], self.spec)


# Faster than the constructor: several trees are made for each micro-batch on each stage.
_flat: Callable[[tuple[list[Any], Structure | None]], FlatTree] = partial(tuple.__new__, FlatTree)


def tree_flatten(tree: Any) -> FlatTree:
    """Flatten ``tree``, or raise a TypeError if a leaf is an object that holds tensors."""
    if type(tree) is Tensor:
        return _flat(([tree], LEAF_SPEC))
    if _has_only_tensors(tree):
        return _flat(([*tree], _structure_of(tree)))
    leaves, spec = _pytree.tree_flatten(tree, is_leaf=_is_opaque)
    if any(map(_is_opaque, leaves)):
        leaves, spec = _pytree.tree_flatten(_with_records(tree), is_leaf=_is_opaque)
    for leaf in leaves:
        if not isinstance(leaf, PLAIN):
            refuse_hidden(leaf)
    return FlatTree(leaves, spec)


def tree_unflatten(flat: FlatTree) -> Any:
    """Unflatten a tree; several joined trees become a list."""
    spec = flat.spec
    if spec is LEAF_SPEC:
        return flat.leaves[0]
    if isinstance(spec, JoinedStructure):
        if spec is not _of_leaves(len(flat.leaves)):
            for inner in spec.specs:
                if inner is not LEAF_SPEC:
                    return list(map(tree_unflatten, parted(flat, len(spec.specs))))
        return list(flat.leaves)
    assert spec is not None, "leaves without a structure cannot be unflattened"
    if (kind := _KIND_OF.get(id(spec))) is not None:
        return kind(flat.leaves)
    return _pytree.tree_unflatten(flat.leaves, spec)


def join(trees: Sequence[FlatTree]) -> FlatTree:
    """Join several trees into one, which :func:`parted` splits again; one alone stays as it is."""
    if len(trees) == 1:
        return trees[0]
    leaves = [leaf for tree in trees for leaf in tree.leaves]
    specs = tuple([tree.spec for tree in trees])
    return FlatTree(leaves, JoinedStructure(specs, tuple([len(tree.leaves) for tree in trees])))


def joined(values: Sequence[Any]) -> FlatTree:
    """Flatten several values into one tree, see :func:`join`."""
    # Most often all are tensors. Stages join values in every micro-batch.
    if len(values) == 1:
        return tree_flatten(values[0])
    for value in values:
        if type(value) is not Tensor:
            return join(list(map(tree_flatten, values)))
    leaves = list(values)
    return FlatTree(leaves, _of_leaves(len(leaves)))


def parted(flat: FlatTree, n: int) -> list[FlatTree]:
    """Split a tree into the ``n`` trees that were joined."""
    if n == 1:
        return [flat]
    assert isinstance(flat.spec, JoinedStructure), "only joined trees can be parted"
    leaves, trees, start = flat.leaves, [], 0
    if flat.spec is _of_leaves(len(leaves)):
        return [FlatTree([leaf], LEAF_SPEC) for leaf in leaves]
    for spec, size in zip(flat.spec.specs, flat.spec.sizes, strict=True):
        trees.append(FlatTree(leaves[start : start + size], spec))
        start += size
    return trees


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Replace each tensor of the tree by ``function(tensor)``."""
    if type(tree) is Tensor:
        return function(tree)
    if _has_only_tensors(tree):
        return type(tree)(map(function, tree))
    return map_instances(Tensor, function, tree)


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors among the leaves of a tree."""
    found: list[Tensor] = []
    map_tensors(found.append, tree)
    return found


def change_tensors(tree: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Replace each tensor of the tree by ``function(tensor)``, with the same marks."""
    return map_tensors(lambda leaf: copy_marks(leaf, function(leaf)), tree)


def map_instances(kind: type[T], function: Callable[[T], Any], tree: Any) -> Any:
    """Replace each leaf of the tree that is a ``kind`` by ``function(leaf)``."""
    leaves, spec = _pytree.tree_flatten(tree, is_leaf=_is_opaque)
    if any(map(_is_opaque, leaves)):
        leaves, spec = _pytree.tree_flatten(_with_records(tree, kind))
    mapped = [function(leaf) if isinstance(leaf, kind) else leaf for leaf in leaves]
    return _pytree.tree_unflatten(mapped, spec)


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Return each leaf with its path, such as ``['mask'][0]``, or "" if the tree is a leaf."""
    return [(_pytree.keystr(path), leaf) for path, leaf in _with_paths(_with_records(tree))]


def entries(tree: Any, needed: Iterable[str | int] = ()) -> list[str | int | None]:
    """Return each leaf's key, index or attribute in ``tree``, or None if the tree is a leaf.

    Raises a ValueError if there are none for the ``needed`` ones.
    """
    leaves = _with_paths(_with_records(tree))
    names = [_entry_of(path[0]) if path else None for path, _ in leaves]
    if missing := [entry for entry in needed if entry not in names]:
        raise ValueError(f"the entries {missing} must exist: got {list(dict.fromkeys(names))}.")
    return names


def map_nodes(function: Callable[[str, Any], Any], tree: Any, chosen: Callable[[Any], bool]) -> Any:
    """Replace each outermost node that is ``chosen`` by ``function(path, node)``, leaves too."""
    tree = _with_records(tree)
    nodes = [
        function(_pytree.keystr(path), x) if chosen(x) else x
        for path, x in _with_paths(tree, chosen)
    ]
    return _pytree.tree_unflatten(nodes, _pytree.tree_flatten(tree, chosen)[1])


def _with_paths(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None, path: tuple[Any, ...] = ()
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the path and the value of each leaf, with numbers for children without keys."""
    node = _pytree.SUPPORTED_NODES.get(_pytree._get_node_type(tree))
    if node is None or (is_leaf is not None and is_leaf(tree)):
        yield path, tree
        return
    if node.flatten_with_keys_fn is not None:
        children: Iterable[tuple[Any, Any]] = node.flatten_with_keys_fn(tree)[0]
    else:
        children = zip(map(_pytree.SequenceKey, count()), node.flatten_fn(tree)[0], strict=False)
    for key, child in children:
        yield from _with_paths(child, is_leaf, (*path, key))


def register_sequence(
    cls: type, leaves_of: Callable[[Any], list[Any]], from_leaves: Callable[[Iterable[Any]], Any]
) -> None:
    """Flatten instances of ``cls`` to these leaves."""
    _pytree.register_pytree_node(
        cls,
        lambda value: (leaves_of(value), None),
        lambda leaves, _: from_leaves(leaves),
        flatten_with_keys_fn=lambda value: (
            [(_pytree.SequenceKey(k), leaf) for k, leaf in enumerate(leaves_of(value))],
            None,
        ),
    )


def is_registered(cls: type) -> bool:
    """Return True if objects of a class are nodes of a tree."""
    return cls in _pytree.SUPPORTED_NODES


def spec_parts(value: Any) -> tuple[Any, ...] | None:
    """Return the parts of a structure, for :func:`spec_of`; None for any other value."""
    if not isinstance(value, _pytree.TreeSpec):
        return None
    kind, *parts = [getattr(value, field.name) for field in fields(value)[:3]]
    return _NAMED if kind is namedtuple else kind, *parts


def spec_of(kind: type | str | None, context: Any, children: list[Any]) -> Structure:
    """Return the structure of a node or a leaf; raise a TypeError for an unknown kind of node."""
    if kind is None:
        return LEAF_SPEC
    exists = issubclass(context, tuple) if kind == _NAMED else kind in _pytree.SUPPORTED_NODES
    if not exists:
        raise TypeError(f"the nodes of a tree must be of registered classes: got {kind}.")
    return _pytree.TreeSpec(namedtuple if kind == _NAMED else kind, context, children)


for _cls in (WholeList, WholeTuple):
    register_sequence(_cls, list, _cls)


def _detached(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.requires_grad:
        return copy_marks(leaf, leaf.detach().requires_grad_(torch.is_grad_enabled()))
    return leaf


def _aliased(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or leaf.requires_grad:
        return _detached(leaf)
    differentiable = leaf.is_floating_point() or leaf.is_complex()
    return copy_marks(leaf, leaf.detach()) if differentiable else leaf


def _entry_of(key: Any) -> Any:
    match key:
        case _pytree.MappingKey():
            return key.key
        case _pytree.SequenceKey():
            return key.idx
        case _pytree.GetAttrKey():
            return key.name


# Dataclasses.


class _DataclassSpec(NamedTuple):
    """The class of a dataclass instance, the names of its attributes, and its keys if a dict."""

    cls: type
    names: tuple[str, ...]
    keys: tuple[str, ...] = ()


class _DataclassNode:
    def __init__(self, kind: _DataclassSpec, values: list[Any]) -> None:
        self.kind = kind
        self.values = values


_STRUCTURES: dict[tuple[type, int], _pytree.TreeSpec] = {}  # of tuples and lists of tensors
_KIND_OF: dict[int, Callable[[list[Any]], Any]] = {}  # the kinds of these, by the ids of structures


def _has_only_tensors(tree: Any) -> bool:
    """Return True for a tuple or a list of tensors, as batches most often are."""
    return type(tree) in (tuple, list) and {*map(type, tree)} == {Tensor}


def _structure_of(tree: Any) -> _pytree.TreeSpec:
    key = kind, size = type(tree), len(tree)
    if key not in _STRUCTURES:  # no functools.cache, of which torch.compile warns
        _STRUCTURES[key] = spec = _pytree.tree_flatten(kind([0] * size))[1]
        _KIND_OF[id(spec)] = kind
    return _STRUCTURES[key]


def _is_opaque(tree: Any) -> bool:
    """Return whether PyTorch must not flatten a PackedSequence or an unregistered dataclass."""
    kind = type(tree)  # not __class__, which a value of a traced forward does not know
    if kind is Tensor:  # most often
        return False
    if issubclass(kind, PackedSequence):
        return True
    return is_dataclass(kind) and kind not in _pytree.SUPPORTED_NODES


def _with_records(tree: Any, kind: type = Tensor) -> Any:
    """Replace each dataclass instance of the tree that holds a ``kind`` by a record."""

    def record_of(leaf: Any) -> Any:
        if not is_dataclass(type(leaf)) or not _is_opaque(leaf):
            return leaf
        values = dict(attributes(leaf))
        has_kind = any(holds_tensor(value, kind=kind) for value in values.values())
        if not has_kind or not _is_determined_by(values, leaf):
            return leaf
        keys = tuple(leaf) if isinstance(leaf, dict) else ()
        spec = _DataclassSpec(type(leaf), tuple(values), keys)
        return _DataclassNode(spec, [_with_records(value, kind) for value in values.values()])

    return _pytree.tree_map(record_of, tree, is_leaf=_is_opaque)


def _is_determined_by(values: Mapping[str, Any], leaf: Any) -> bool:
    """Return whether an equal instance can be made from the attributes alone.

    So can a dataclass that is a dict, if its items are attributes, like those of a ModelOutput.
    """
    if isinstance(leaf, dict):
        return all(key in values and values[key] is value for key, value in leaf.items())
    return not isinstance(leaf, Collection) or type(leaf).__new__ is object.__new__


def _from_record(values: Iterable[Any], kind: _DataclassSpec) -> Any:
    base = kind.cls if issubclass(kind.cls, dict) else object
    instance: Any = base.__new__(kind.cls)  # __init__ has already processed these values
    for name, value in zip(kind.names, values, strict=True):
        object.__setattr__(instance, name, value)  # works for frozen dataclasses too
    mapping = OrderedDict if issubclass(kind.cls, OrderedDict) else dict
    for key in kind.keys:
        mapping.__setitem__(instance, key, getattr(instance, key))
    return instance


_pytree.register_pytree_node(
    _DataclassNode,
    lambda record: (record.values, record.kind),
    _from_record,
    flatten_with_keys_fn=lambda record: (
        list(zip(map(_pytree.GetAttrKey, record.kind.names), record.values, strict=True)),
        record.kind,
    ),
)
