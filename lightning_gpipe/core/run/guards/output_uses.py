"""Uses of several outputs in which those of a pipeline differ from those of the plain module.

Each output of a pipeline is a tensor of its own. In the plain module one may be computed from
another, and the other's hooks then see the gradient of both; or two share memory, and an edit of
one shows in the other. A backward through the outputs warns of such hooks and edits.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gpipe.core.data import FlatTree, memory, requires_grad, tree_flatten

_HOOKED = (
    "a hook on one of a pipeline's outputs, or its retain_grad, has the gradient that comes to it "
    "directly, without what comes through another output that a layer computes from it, as logits "
    "are from hidden states. If there is one, register the hook in the layer."
)
_EDITED = (
    "outputs of a pipeline that share memory in the plain module, such as a tensor and a view of "
    "it, do not: got an in-place edit of one, which may not show in the other. Write the "
    "out-of-place form, or take the view after the pipeline."
)


def watch_outputs(values: Sequence[Any], first: FlatTree) -> None:
    """Let a backward through the values warn of hooks on them, and of edits.

    ``first`` has what the first micro-batch has in their places, of which some may share memory.
    """
    if len(values) == 1 and isinstance(values[0], Tensor):
        return  # most often
    leaves = tree_flatten(values).leaves
    tensors = [leaf for leaf in leaves if requires_grad(leaf)]
    if len(tensors) < 2 or not torch.is_grad_enabled():
        return
    memories = list(map(memory, first.leaves))
    times = Counter(memories)
    shared = [
        leaf.detach()  # of the same version, and in no graph
        for leaf, address in zip(leaves, memories, strict=False)
        if requires_grad(leaf) and address is not None and times[address] > 1
    ]
    watch = _Watch(tensors, shared)
    for node in dict.fromkeys(tensor.grad_fn for tensor in tensors):
        if node is not None:
            node.register_prehook(watch.look)


class _Watch:
    """Looks at outputs once, which it does not keep alive unless they share memory."""

    def __init__(self, tensors: Sequence[Tensor], shared: Sequence[Tensor]) -> None:
        self._tensors = list(map(weakref.ref, tensors))
        for tensor in tensors:
            tensor.register_hook(_nothing).remove()  # so that it has a list of its hooks
        self._hooks = [tensor._backward_hooks for tensor in tensors]
        self._shared = [(tensor, tensor._version) for tensor in shared]

    def look(self, _: Any) -> None:
        tensors = [reference() for reference in self._tensors]
        retained = any(tensor is not None and tensor.retains_grad for tensor in tensors)
        if retained or any(self._hooks):
            warnings.warn(_HOOKED, stacklevel=2)
        if any(tensor._version != version for tensor, version in self._shared):
            warnings.warn(_EDITED, stacklevel=2)
        self._tensors, self._hooks, self._shared = [], [], []


def _nothing(_: Tensor) -> None: ...
