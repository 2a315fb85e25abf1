"""The tensors at the borders of a stage: what it sends on, and the gradients of what it got."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_gpipe.core.data import FlatTree, copy_marks, join, mark_aliased, memory, parted
from lightning_gpipe.core.plan import Route


def sent(outputs: FlatTree, j: int, leaving: Sequence[Route]) -> FlatTree:
    """The outputs of stage ``j``, detached: leaves for the graphs of the stages that get them.

    Args:
        outputs: The outputs; if any leave by routes, joined with those.
        j: The stage.
        leaving: The routes.
    """
    if not leaving:
        return outputs.detached()
    trees = [each.detached() for each in parted(outputs)]  # one by one: each gets its gradient
    return join(mark_shared(trees, [j + 1, *(route.target for route in leaving)]))


def mark_shared(trees: Sequence[FlatTree], targets: Sequence[int]) -> list[FlatTree]:
    """The trees, with marks on the tensors whose memory goes to several targets.

    Args:
        trees: What is sent.
        targets: The stage to which each of them is sent.
    """
    memories = [[memory(leaf) for leaf in tree.leaves] for tree in trees]
    targets_of: dict[int | None, set[int]] = {}
    for found, target in zip(memories, targets, strict=True):
        for each in found:
            targets_of.setdefault(each, set()).add(target)
    shared = {key for key, to in targets_of.items() if key is not None and len(to) > 1}
    if not shared:
        return list(trees)
    return [
        FlatTree(
            [
                _marked(leaf) if each in shared else leaf
                for leaf, each in zip(leaves, found, strict=True)
            ],
            spec,
        )
        for (leaves, spec), found in zip(trees, memories, strict=True)
    ]


def apart(outputs: FlatTree, inputs: FlatTree) -> FlatTree:
    """The outputs without the memory of the inputs, for the caller, who may edit them in place."""
    kept = {memory(leaf) for leaf in inputs.leaves} - {None}
    shared = [memory(leaf) in kept for leaf in outputs.leaves]
    if not any(shared):
        return outputs
    leaves = [
        copy_marks(leaf, leaf.clone()) if copied else leaf
        for leaf, copied in zip(outputs.leaves, shared, strict=True)
    ]
    return FlatTree(leaves, outputs.spec)


def gradients_in(leaves: list[Any]) -> list[Tensor | None]:
    """The gradients of a stage's inputs; a tensor that appears twice has its gradient once.

    They stay in the leaves too: a layer may have kept its input to look at them.
    """
    if len(leaves) == 1 and isinstance(leaves[0], Tensor):
        return [leaves[0].grad]
    first = {id(leaf): k for k, leaf in reversed(list(enumerate(leaves)))}
    return [
        leaf.grad if isinstance(leaf, Tensor) and first[id(leaf)] == k else None
        for k, leaf in enumerate(leaves)
    ]


def _marked(leaf: Tensor) -> Tensor:
    """The leaf with a mark; a new object if it may be the caller's own."""
    marked = leaf if leaf.requires_grad else copy_marks(leaf, leaf.detach())
    mark_aliased(marked)
    return marked
