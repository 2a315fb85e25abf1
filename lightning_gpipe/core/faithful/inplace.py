"""Layers that edit their input in place.

What a stage gets as input is not its own: the stage before it may have saved that tensor for its
backward, a recomputation needs it once more as it was, and a tensor that every micro-batch gets
whole is the same for all of them. In the plain module the edit is right, so it must be right here.

To copy every input would be simple, and cost the memory of all inputs once more. But tensors count
their edits. So a stage copies its inputs the first time, sees which of them its layers edit, and
from then on copies those. Edits through ``tensor.data`` are not counted: PyTorch does not see them.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_gpipe.core.data import copy_marks, identity, is_aliased, is_whole, overlap
from lightning_gpipe.core.faithful.behavior import Behavior


class MutationGuard:
    """Lets a stage's layers run on leaves that they may edit, for one run.

    Args:
        behavior: What is known of the layers, and where to note what they edit in the first run.
        leaves: The inputs.
        grad: Whether gradients are recorded; without, only marked tensors need care.

    Attributes:
        leaves: What to run them on, not to be changed. What was one tensor in two places still is.
    """

    # One is made for every action.
    __slots__ = (
        "_behavior",
        "_editors",
        "_expected",
        "_given",
        "_guarded",
        "_versions",
        "leaves",
    )

    def __init__(self, behavior: Behavior, leaves: list[Any], *, grad: bool) -> None:
        self._behavior = behavior
        self._given = leaves
        guarded = [
            k
            for k, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and (grad or is_whole(leaf) or is_aliased(leaf))
        ]
        self._guarded = tuple(guarded)
        self._expected = behavior.edited_inputs.get(self._guarded)
        self._editors: dict[int, str] = {}
        self.leaves, self._versions = leaves, _versions(leaves, guarded)
        copied = guarded if self._expected is None else self._expected
        if copied or len(self._versions) < len(guarded):
            self.leaves = _with_copies(leaves, guarded, copied)
            self._versions = _versions(self.leaves, guarded)

    def after(self, index: int, layer: nn.Module) -> None:
        """Note what a layer edited, by its index in the whole module."""
        for k, leaf, version in self._versions:
            if leaf._version != version and k not in self._editors:
                self._editors[k] = f"layer {index} ({type(layer).__name__})"

    def close(self) -> None:
        """Learn from the run what the layers edit.

        Raises:
            RuntimeError: If it was not copied, because earlier runs did not edit it, or if another
                input is a part of it.
        """
        if self._expected is None:
            self._check_overlaps()
            self._behavior.edited_inputs[self._guarded] = set(self._editors)
            return
        for k, editor in self._editors.items():
            if k not in self._expected:
                raise RuntimeError(
                    f"{editor} must edit its input in place always or never: it edited input {k} "
                    "of its stage for the first time after an earlier run that did not. Use the "
                    "out-of-place form, such as nn.ReLU(inplace=False)."
                )

    def _check_overlaps(self) -> None:
        for k, editor in self._editors.items():
            edited = self._given[k]
            if is_aliased(edited):
                raise RuntimeError(
                    f"{editor} must not edit a tensor that a skip connection takes to another "
                    f"stage: it edited input {k} of its stage. Use the out-of-place form, such as "
                    "nn.ReLU(inplace=False), or stash a clone."
                )
            for other in self._guarded:
                leaf = self._given[other]
                if identity(leaf) != identity(edited) and overlap(leaf, edited):
                    raise RuntimeError(
                        f"{editor} must not edit an input of which another input is a part: it "
                        f"edited input {k} of its stage, which shares memory with input {other}. "
                        "Use the out-of-place form, such as nn.ReLU(inplace=False)."
                    )


def _with_copies(leaves: list[Any], guarded: Sequence[int], copied: Collection[int]) -> list[Any]:
    """The leaves with copies of those to be copied, and wherever else the same tensor is."""
    copies: dict[Hashable, Tensor] = {
        identity(leaves[k]): copy_marks(leaves[k], leaves[k].clone())
        for k in guarded
        if k in copied or leaves[k].is_inference()
    }
    if not copies:
        return leaves
    result = list(leaves)
    for k in guarded:
        result[k] = copies.get(identity(leaves[k]), leaves[k])
    return result


def _versions(leaves: list[Any], guarded: Sequence[int]) -> list[tuple[int, Tensor, int]]:
    """How often tensors were edited; PyTorch does not count it for those of inference mode."""
    return [(k, leaves[k], leaves[k]._version) for k in guarded if not leaves[k].is_inference()]
