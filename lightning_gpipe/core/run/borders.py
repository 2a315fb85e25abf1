"""The tensors at the borders of a stage: what it sends on, and the gradients of what it got."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_gpipe.core.data import FlatTree, copy_marks, mark_aliased, memory
from lightning_gpipe.core.run.stage import Stage


def sent(stage: Stage, outputs: FlatTree) -> FlatTree:
    """The outputs, detached: leaves for the graphs of the stages that they are sent to."""
    if not stage.leaving:
        return outputs.detached()
    main = len(outputs.leaves) - len(stage.leaving)
    leaves = FlatTree(outputs.leaves[:main]).detached().leaves
    targets = [stage.partition.index + 1] * main
    for route, tensor in zip(stage.leaving, outputs.leaves[main:], strict=True):
        leaves += FlatTree([tensor]).detached().leaves
        targets.append(route.target)
    targets_of: dict[int | None, set[int]] = {}
    for leaf, target in zip(leaves, targets, strict=True):
        targets_of.setdefault(memory(leaf), set()).add(target)
    for leaf in leaves:
        if memory(leaf) is not None and len(targets_of[memory(leaf)]) > 1:
            mark_aliased(leaf)
    return FlatTree(leaves, outputs.spec)


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
