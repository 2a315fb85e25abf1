"""The pipeline as one ordinary node in the caller's graph.

The node's inputs are the micro-batches, the parameters and what layers captured from outside, its
outputs those of the last stage. Its backward runs the backward phase of the schedule and returns
each parameter's gradient once, so everything that uses gradients works as usual: hooks, gradient
scalers, data parallelism, ``torch.autograd.grad(loss, parameters)``.

# Note [The blocking node must be a CPU node]
The node's backward waits for workers that run backward themselves. PyTorch's engine has one thread
per CUDA device for the whole process, and a node whose outputs are on a device runs on that
device's thread; blocking that thread would starve the workers that the node waits for. So there are
two nodes. The blocking one (:class:`_Sources`) has a CPU scalar as its only output, and therefore
runs on the thread that called ``backward()``. A second one (:class:`_Outputs`) connects the real
outputs to that scalar, and its backward only stores their gradients::

    micro-batches, parameters --> _Sources --(scalar on CPU)--> _Outputs --> outputs

The loss of a step with a loss for each micro-batch is such a pair, too, see ``known_gradients``.

If backward() is called within another backward, as by `torch.utils.checkpoint` with
use_reentrant=True, that thread may be a device's thread after all. It must not be blocked, so the
backward phase then runs on it, in the schedule's order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function
from typing_extensions import override

from lightning_gpipe.core.data import FlatTree, copy_marks, requires_grad
from lightning_gpipe.core.faithful import not_compiled
from lightning_gpipe.core.run.backward.sums import Gradients
from lightning_gpipe.core.run.minibatch import MiniBatch

Leaf = tuple[int, int]  # micro-batch i, the index of the leaf

_TWICE = (
    "a pipeline cannot be differentiated twice: got a backward with create_graph=True. Compute "
    "what needs it, such as a gradient penalty, on the plain module."
)
_AGAIN = (
    "backward must run once through a pipeline's output: got a second one. The first frees the "
    "activations, with retain_graph=True too. Add the losses up before backward, or run the "
    "forward again."
)


class BackwardOnce(ABC):
    """The backward of a pair of nodes, which runs once.

    Args:
        twice: The message for a backward that is to be differentiated.
        again: The message for a second backward.
    """

    def __init__(self, twice: str, again: str) -> None:
        self._twice, self._again = twice, again
        self._ran = False

    def check(self) -> None:
        """Raise if backward would have to run a second time, or to be differentiated."""
        if torch.is_grad_enabled():
            raise RuntimeError(self._twice)
        if self._ran:
            raise RuntimeError(self._again)

    def run(self) -> Iterable[Tensor | None]:
        """Compute the gradients of the sources."""
        self.check()
        self._ran = True
        return self.source_gradients()

    @abstractmethod
    def store(self, gradients: Sequence[Tensor | None]) -> None:
        """Store the gradients of the outputs."""

    @abstractmethod
    def source_gradients(self) -> Iterable[Tensor | None]:
        """Compute the gradients of the sources from those of the outputs."""


def connect(
    backward: BackwardOnce, sources: Sequence[Tensor], outputs: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Connect outputs, in no graph, with the sources of their gradients in the caller's graph."""
    connected: Sequence[Tensor] = _Outputs.apply(
        backward, outputs, _Sources.apply(backward, *sources)
    )
    return connected


def attach(
    minibatch: MiniBatch, inputs: Sequence[FlatTree], outputs: Sequence[FlatTree]
) -> list[FlatTree]:
    """Give ``outputs`` a gradient function that runs the mini-batch's backward phase.

    Returns:
        The outputs in the caller's graph. A second backward through them, and one with
        ``create_graph=True``, raise RuntimeError.
    """
    leaves = _OutputLeaves(outputs)
    if not leaves.places:
        return list(outputs)
    backward = _BackwardPhase(minibatch, _requiring_grad(inputs), leaves)
    # The anchor makes backward run even if only tensors that nn.Module does not know need it.
    anchor = torch.empty((), device="cpu", requires_grad=True)
    sources = [inputs[i].leaves[k] for i, k in backward.input_leaves]
    sources = [anchor, *sources, *minibatch.leaves]
    return leaves.replaced(connect(backward, sources, leaves.tensors))


class StepOutputs:
    """The outputs of one micro-batch, in which the graph of the caller's code ends.

    Attributes:
        outputs: The outputs, in the caller's graph.
        anchor: The leaf in which that graph ends, if an output requires a gradient.
    """

    def __init__(self, outputs: FlatTree) -> None:
        leaves = _OutputLeaves([outputs])
        self._stored = _StoredGradients(leaves)  # the node refers to this, and not to its outputs
        self.anchor: Tensor | None = None
        self.outputs = outputs
        if leaves.places:
            self.anchor = torch.zeros((), device="cpu", requires_grad=True)
            tensors = _Outputs.apply(self._stored, leaves.tensors, self.anchor)
            [self.outputs] = leaves.replaced(tensors)

    def take_gradients(self) -> Gradients:
        """Return the gradients of the leaves, after the caller's backward; no longer held here."""
        return self._stored.source_gradients()


class _OutputLeaves:
    """The leaves that require a gradient among the outputs of micro-batches, and their gradients.

    Attributes:
        places: The micro-batch of each leaf, and its index there.
        tensors: The leaves, detached, until they are replaced.

    Raises:
        ValueError: If one of the leaves is a nested tensor of the older layout, which no autograd
            function can return.
    """

    def __init__(self, outputs: Sequence[FlatTree]) -> None:
        self._outputs = outputs
        self.places = _requiring_grad(outputs)
        self._gradients: list[Gradients] = [[None] * len(output.leaves) for output in outputs]
        self.tensors = [outputs[i].leaves[k].detach() for i, k in self.places]
        for leaf in self.tensors:
            if leaf.is_nested and leaf.layout is torch.strided:
                raise ValueError(
                    "outputs of a pipeline that require gradients must be dense: got a nested "
                    "tensor. Return it padded, with torch.nested.to_padded_tensor(x, 0.0)."
                )

    def replaced(self, tensors: Sequence[Tensor]) -> list[FlatTree]:
        """Return the outputs with other tensors in place of the leaves."""
        result = [FlatTree(list(leaves), spec) for leaves, spec in self._outputs]
        for (i, k), tensor in zip(self.places, tensors, strict=True):
            result[i].leaves[k] = copy_marks(self._outputs[i].leaves[k], tensor)
        self._outputs, self.tensors = (), []
        return result

    def store(self, gradients: Sequence[Tensor | None]) -> None:
        for (i, k), gradient in zip(self.places, gradients, strict=True):
            self._gradients[i][k] = gradient

    def take_gradients(self) -> list[Gradients]:
        """Return the gradients of each micro-batch's leaves, and drop them here."""
        gradients, self._gradients = self._gradients, []
        return gradients


class _StoredGradients(BackwardOnce):
    """Stores the gradients of the leaves of outputs."""

    def __init__(self, leaves: _OutputLeaves) -> None:
        super().__init__(_TWICE, _AGAIN)
        self._leaves = leaves

    @override
    def store(self, gradients: Sequence[Tensor | None]) -> None:
        self._leaves.store(gradients)

    @override
    def source_gradients(self) -> Gradients:
        self._ran = True
        [gradients] = self._leaves.take_gradients()
        return gradients


class _BackwardPhase(_StoredGradients):
    """Runs the backward phase of a mini-batch with them."""

    def __init__(
        self, minibatch: MiniBatch, input_leaves: list[Leaf], leaves: _OutputLeaves
    ) -> None:
        super().__init__(leaves)
        self.input_leaves = input_leaves
        self._minibatch: MiniBatch | None = minibatch

    @override
    def source_gradients(self) -> Gradients:
        minibatch, self._minibatch = self._minibatch, None  # the user may keep the output alone
        assert minibatch is not None, "it runs once"
        inputs, leaves = minibatch.backward(self._leaves.take_gradients())
        of_inputs = [inputs[i][k] if inputs[i] else None for i, k in self.input_leaves]
        return [None, *of_inputs, *leaves]


class _Sources(Function):
    """The blocking node, whose backward returns the gradients of the sources."""

    @staticmethod
    def forward(ctx: Any, backward: BackwardOnce, *sources: Tensor) -> Tensor:
        ctx.backward_once = backward
        return torch.empty((), device="cpu")  # nobody reads its value

    @staticmethod
    @not_compiled
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:
        backward: BackwardOnce = ctx.backward_once
        return (None, *backward.run())


class _Outputs(Function):
    """The node of the outputs, whose backward stores their gradients without blocking."""

    @staticmethod
    def forward(
        ctx: Any, backward: BackwardOnce, outputs: Sequence[Tensor], scalar: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.backward_once = backward
        return tuple(outputs)

    @staticmethod
    @not_compiled
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        backward: BackwardOnce = ctx.backward_once
        backward.check()
        backward.store(gradients)
        return (None, None, torch.zeros((), device="cpu"))


def _requiring_grad(flats: Sequence[FlatTree]) -> list[Leaf]:
    return [
        (i, k)
        for i, flat in enumerate(flats)
        for k, leaf in enumerate(flat.leaves)
        if requires_grad(leaf)
    ]
