"""Layers that edit their input in place, as they may in the plain module.

In a pipeline the previous stage may have saved the input for its backward, a recomputation needs
its values, and micro-batches share a tensor that each gets whole. So a stage copies all inputs in
its first run, records by their version counters which of them its layers edit, and later copies
only those. Edits through ``tensor.data`` are not noticed.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.grad_mode import inference_mode

from lightning_gpipe.core.data import copy_marks, identity, is_aliased, is_whole, overlap
from lightning_gpipe.core.faithful.state.behavior import Behavior


class MutationGuard:
    """Protects the inputs of a stage from in-place edits by its layers, for one run.

    ``leaves`` are the inputs, copied where needed; one that appears twice stays one tensor. Earlier
    runs' ``behavior`` says where; the first run is recorded in it. If ``marked``, marked tensors
    alone are guarded, because nothing else needs the inputs again.
    """

    def __init__(self, behavior: Behavior, leaves: list[Any], *, marked: bool) -> None:
        self._behavior = behavior
        self._inputs = self.leaves = leaves
        guarded: list[int] = []
        versions: list[tuple[int, Tensor, int]] = []  # inference tensors have none
        for k, leaf in enumerate(leaves):  # no comprehensions: one is made for every action
            if isinstance(leaf, Tensor) and (not marked or is_whole(leaf) or is_aliased(leaf)):
                guarded.append(k)
                if not leaf.is_inference():
                    versions.append((k, leaf, leaf._version))
        self._guarded, self._versions = tuple(guarded), versions
        self._expected = behavior.edited_inputs.get(self._guarded)
        self.first = self._expected is None
        self._editors: dict[int, str] = {}
        copied = guarded if self._expected is None else self._expected
        if copied or len(self._versions) < len(guarded):
            self.leaves = _with_copies(leaves, guarded, copied)
            inputs = [(k, self.leaves[k]) for k in guarded]
            self._versions = [(k, x, x._version) for k, x in inputs if not x.is_inference()]

    @property
    def expects_none(self) -> bool:
        """True if earlier runs edited nothing, so that an edit would be an error."""
        return self._expected is not None and not self._expected

    @property
    def editors(self) -> Collection[str]:
        """The layers that have edited inputs, by their titles."""
        return self._editors.values()

    def after(self, title: str) -> None:
        for k, leaf, version in self._versions:
            if leaf._version != version and k not in self._editors:
                self._editors[k] = title

    def close(self) -> None:
        """Record the edited inputs of the first run; raise if a later one edits others."""
        for k, editor in self._editors.items():
            if is_aliased(self._inputs[k]):  # in each run: who else gets a tensor may change
                raise RuntimeError(
                    f"{editor} must not edit a tensor that another stage gets too, as by a skip "
                    f"connection: it edited input {k} of its stage. Use the out-of-place form, "
                    "such as nn.ReLU(inplace=False), or pass on a clone."
                )
        if self._expected is None:
            self._check_overlaps()
            if len(self._versions) == len(self._guarded):  # no inference tensors, without counters
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
            edited = self._inputs[k]
            for other in self._guarded:
                leaf = self._inputs[other]
                if identity(leaf) != identity(edited) and overlap(leaf, edited):
                    raise RuntimeError(
                        f"{editor} must not edit an input that overlaps another input: it edited "
                        f"input {k} of its stage, which shares memory with input {other}. Use the "
                        "out-of-place form, such as nn.ReLU(inplace=False)."
                    )


def _with_copies(leaves: list[Any], guarded: Sequence[int], copied: Collection[int]) -> list[Any]:
    copies: dict[Hashable, Tensor] = {
        identity(leaves[k]): copy_marks(leaves[k], _copy(leaves[k]))
        for k in guarded
        if k in copied or leaves[k].is_inference()
    }
    if not copies:
        return leaves
    result = list(leaves)
    for k in guarded:
        result[k] = copies.get(identity(leaves[k]), leaves[k])
    return result


def _copy(leaf: Tensor) -> Tensor:
    if not torch.is_inference_mode_enabled() or leaf.is_inference():
        return leaf.clone()
    with inference_mode(False):  # a clone made in inference mode would have no version counter
        return leaf.detach().clone()
