"""Tensors at the borders of a stage: detached outputs, and the gradients of inputs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor

from lightning_gpipe.core.data import FlatTree, copy_marks, join, mark_aliased, memory, parted
from lightning_gpipe.core.programs import Route, SkipName

_TERMS = SkipName(None, "loss terms")


def term_route(j: int, n: int) -> Route:
    """Return the route of the loss terms of stage ``j`` to the caller, after the last of ``n``."""
    return Route(_TERMS, source=j, target=n)


def sent(outputs: FlatTree, j: int, leaving: Sequence[Route]) -> FlatTree:
    """Detach the outputs of stage ``j``, joined with those that leave by the routes ``leaving``."""
    if not leaving:
        return outputs.detached()
    trees = parted(outputs, 1 + len(leaving))
    # Loss terms, the last, may share memory with others: the caller takes them as they are.
    targets = [route.target for route in leaving if route.name is not _TERMS]
    shared = _shared(trees, [j + 1, *targets])
    # One by one, for each gets its gradient.
    return join([_marked(tree.detached(), tree, shared) for tree in trees])


def handed(trees: Sequence[FlatTree], targets: Sequence[int]) -> list[FlatTree]:
    """Make new objects for the tensors in trees that the caller sends to ``targets``, stages."""
    shared = _shared(trees, targets)
    return [_marked(tree.aliased(), tree, shared) for tree in trees]


def _shared(trees: Sequence[FlatTree], targets: Sequence[int]) -> set[int]:
    targets_of: dict[int, set[int]] = {}
    memory_of: dict[int, int | None] = {}
    for tree, target in zip(trees, targets, strict=False):
        for leaf in tree.leaves:
            key = id(leaf)
            if key not in memory_of:
                memory_of[key] = memory(leaf)
            address = memory_of[key]
            if address is not None:
                targets_of.setdefault(address, set()).add(target)
    several = {address for address, stages in targets_of.items() if len(stages) > 1}
    return {key for key, address in memory_of.items() if address in several} if several else set()


def _marked(new: FlatTree, old: FlatTree, shared: Collection[int]) -> FlatTree:
    """Mark the tensors of a tree that were shared before, each a new object."""
    if not shared:
        return new
    leaves = list(new.leaves)
    for k, leaf in enumerate(old.leaves):
        if id(leaf) in shared:
            if leaves[k] is leaf:
                leaves[k] = copy_marks(leaf, leaf.detach())
            mark_aliased(leaves[k])
    return FlatTree(leaves, new.spec)


def apart(outputs: FlatTree, inputs: FlatTree) -> FlatTree:
    """Copy outputs that share the inputs' memory, for the caller may edit them in place."""
    addresses = {memory(leaf) for leaf in inputs.leaves} - {None}
    shared = [memory(leaf) in addresses for leaf in outputs.leaves]
    if not any(shared):
        return outputs
    leaves = [
        copy_marks(leaf, leaf.clone()) if copied else leaf
        for leaf, copied in zip(outputs.leaves, shared, strict=True)
    ]
    return FlatTree(leaves, outputs.spec)


def gradients_in(leaves: list[Any]) -> list[Tensor | None]:
    """Return the gradients of a stage's inputs; one of a tensor that appears twice, once."""
    if len(leaves) == 1 and isinstance(leaves[0], Tensor):
        return [leaves[0].grad]
    first = {id(leaf): k for k, leaf in reversed(list(enumerate(leaves)))}
    return [
        leaf.grad if isinstance(leaf, Tensor) and first[id(leaf)] == k else None
        for k, leaf in enumerate(leaves)
    ]


def filled(gradients: FlatTree, sizes: Sequence[int]) -> FlatTree:
    """Return the gradients, with None for all leaves of a way without gradients."""
    ways = zip(parted(gradients, len(sizes)), sizes, strict=True)
    return FlatTree([leaf for way, size in ways for leaf in way.leaves or [None] * size])
