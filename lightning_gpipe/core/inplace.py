"""Layers that edit their input in place.

What a stage gets as input is not its own: the stage before it may have saved that tensor for its
backward, a recomputation needs it once more as it was, and a tensor that every micro-batch gets
whole is the same for all of them. In the plain module the edit is right, so it must be right here.

To copy every input would be simple, and cost the memory of all inputs once more. But tensors count
their edits. So a stage copies its inputs the first time, sees which of them its layers edit, and
from then on copies those.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor, nn

from lightning_gpipe.core.whole import carry, is_whole


class Edits:
    """Which inputs the layers of one stage edit.

    That may depend on the structure of the input and on the training mode: the circumstances.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, set[int]] = {}

    def watch(self, circumstances: Hashable, leaves: list[Any], *, grad: bool) -> Watch:
        """Prepare one run on ``leaves``; without gradients, only marked tensors need care."""
        guarded = {
            k
            for k, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and (grad or is_whole(leaf))
        }
        return Watch(self._known, circumstances, leaves, guarded)


class Watch:
    """One run of a stage's layers.

    Attributes:
        leaves: What to run them on.
    """

    def __init__(
        self,
        known: dict[Hashable, set[int]],
        circumstances: Hashable,
        leaves: list[Any],
        guarded: set[int],
    ) -> None:
        self._known = known
        self._circumstances = circumstances
        self._expected = known.get(circumstances, guarded)
        copied = {k for k in guarded if k in self._expected or leaves[k].is_inference()}
        self.leaves = [
            carry(leaf, leaf.clone()) if k in copied else leaf for k, leaf in enumerate(leaves)
        ]
        self._versions = {k: _version(self.leaves[k]) for k in guarded}
        self._editors: dict[int, str] = {}

    def after(self, index: int, layer: nn.Module) -> None:
        """Take note of what a layer did, by its index in the whole module."""
        for k, version in self._versions.items():
            if _version(self.leaves[k]) != version and k not in self._editors:
                self._editors[k] = f"layer {index} ({type(layer).__name__})"

    def close(self) -> None:
        """Remember what was edited.

        Raises:
            RuntimeError: If it was not copied, because earlier runs did not edit it.
        """
        for k, editor in self._editors.items():
            if k not in self._expected:
                raise RuntimeError(
                    f"{editor} must edit its input in place always or never: it edited input {k} "
                    "of its stage for the first time after an earlier run that did not. Use the "
                    "out-of-place form, such as nn.ReLU(inplace=False)."
                )
        self._known.setdefault(self._circumstances, set(self._editors))


def _version(tensor: Tensor) -> int:
    """How often a tensor was edited; not counted for those made in inference mode."""
    return 0 if tensor.is_inference() else tensor._version
