"""The pipeline as one ordinary node in the caller's graph.

The node's inputs are the micro-batches, the parameters and what layers captured from outside, its
outputs those of the last stage. Its backward runs the backward phase of the schedule and returns
each parameter's gradient once, so everything that uses gradients works as usual: hooks, gradient
scalers, data parallelism, ``torch.autograd.grad(loss, parameters)``.

# Note [The blocking node must be a CPU node]
The node's backward waits for workers that run backward themselves. PyTorch's engine has one thread
per CUDA device for the whole process, and a node whose outputs are on a device runs on that
device's thread; blocking that thread would starve the workers that the node waits for. So there are
two nodes. The blocking one (:class:`_Run`) has a CPU scalar as its only output, and therefore runs
on the thread that called ``backward()``. A second one (:class:`_Attach`) connects the real outputs
to that scalar, and its backward only stores their gradients::

    micro-batches, parameters --> _Run --(scalar on CPU)--> _Attach --> outputs

If backward() is called within another backward, as by `torch.utils.checkpoint` with
use_reentrant=True, that thread may be a device's thread after all. It must not be blocked, so the
backward phase then runs on it, in the schedule's order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from lightning_gpipe.core.data import FlatTree, copy_marks, requires_grad
from lightning_gpipe.core.faithful import not_compiled
from lightning_gpipe.core.run.gradients import Gradients
from lightning_gpipe.core.run.minibatch import MiniBatch

Leaf = tuple[int, int]  # micro-batch i, the index of the leaf


def attach(
    minibatch: MiniBatch, inputs: Sequence[FlatTree], outputs: Sequence[FlatTree]
) -> list[FlatTree]:
    """Give ``outputs`` a gradient function that runs the mini-batch's backward phase.

    Args:
        minibatch: The mini-batch, after its forward.
        inputs: The micro-batches, in the caller's graph.
        outputs: The outputs of the micro-batches, in no graph.

    Returns:
        The outputs in the caller's graph. A second backward through them, and one with
        ``create_graph=True``, raise RuntimeError.
    """
    output_leaves = _requiring_grad(outputs)
    if not output_leaves:
        return list(outputs)
    _refuse_nested(outputs, output_leaves)
    input_leaves = _requiring_grad(inputs)
    sources = [inputs[i].leaves[k] for i, k in input_leaves] + minibatch.leaves
    # The anchor makes backward run even if only tensors that nn.Module does not know need it.
    anchor = torch.empty((), device="cpu", requires_grad=True)
    output_gradients = _OutputGradients(outputs)
    scalar = _Run.apply(minibatch, output_gradients, input_leaves, anchor, *sources)
    return _attached(output_gradients, outputs, output_leaves, scalar)


def _attached(
    output_gradients: _OutputGradients,
    outputs: Sequence[FlatTree],
    output_leaves: list[Leaf],
    scalar: Tensor,
) -> list[FlatTree]:
    """The outputs behind ``scalar``, through a node that stores their gradients."""
    tensors = [outputs[i].leaves[k].detach() for i, k in output_leaves]
    attached = _Attach.apply(output_gradients, output_leaves, tensors, scalar)
    result = [FlatTree(list(leaves), spec) for leaves, spec in outputs]
    for (i, k), tensor in zip(output_leaves, attached, strict=True):
        result[i].leaves[k] = copy_marks(outputs[i].leaves[k], tensor)
    return result


class HandedOut:
    """The outputs of one micro-batch in the graph of the caller's code, which ends in them.

    Args:
        outputs: The outputs, in no graph.

    Attributes:
        outputs: They, in the caller's graph.
        anchor: The leaf in which that graph ends, if an output requires a gradient.
    """

    def __init__(self, outputs: FlatTree) -> None:
        self._gradients = _OutputGradients([outputs])
        self.anchor: Tensor | None = None
        self.outputs = outputs
        if output_leaves := _requiring_grad([outputs]):
            _refuse_nested([outputs], output_leaves)
            self.anchor = torch.zeros((), device="cpu", requires_grad=True)
            of = self._gradients, [outputs], output_leaves, self.anchor
            [self.outputs] = _attached(*of)

    def take_gradients(self) -> Gradients:
        """The gradients of the leaves, after the caller's backward; no longer held here."""
        [gradients] = self._gradients.take()
        return gradients


def _refuse_nested(outputs: Sequence[FlatTree], leaves: Iterable[Leaf]) -> None:
    """Raise for nested tensors of the older layout, which no autograd function can return.

    Raises:
        ValueError: If one of these leaves of the outputs is such a tensor.
    """
    for i, k in leaves:
        x = outputs[i].leaves[k]
        if x.is_nested and x.layout is torch.strided:
            raise ValueError(
                "outputs of a pipeline that require gradients must be dense: got a nested tensor. "
                "Return it padded, with torch.nested.to_padded_tensor(x, 0.0)."
            )


class _OutputGradients:
    """The gradients of the outputs, stored by one node for the other.

    Attributes:
        gradients: For each micro-batch, those of its output's leaves.
        taken: Whether they were taken.
    """

    def __init__(self, outputs: Sequence[FlatTree]) -> None:
        self.gradients: list[Gradients] = [[None] * len(output.leaves) for output in outputs]
        self.taken = False

    def take(self) -> list[Gradients]:
        """The gradients, which are no longer held here."""
        gradients, self.gradients, self.taken = self.gradients, [], True
        return gradients

    def refuse_another_pass(self) -> None:
        """Raise if backward would have to run a second time, or to be differentiated."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a pipeline cannot be differentiated twice: got a backward with "
                "create_graph=True. Compute what needs it, such as a gradient penalty, on the "
                "plain module."
            )
        if self.taken:
            raise RuntimeError(
                "backward must run once through a pipeline's output: got a second one. The first "
                "frees the activations, with retain_graph=True too. Add the losses up before "
                "backward, or run the forward again."
            )


class _Run(Function):
    """The blocking node: its backward runs the backward phase."""

    @staticmethod
    def forward(
        ctx: Any,
        minibatch: MiniBatch,
        output_gradients: _OutputGradients,
        input_leaves: list[Leaf],
        anchor: Tensor,
        *sources: Tensor,
    ) -> Tensor:
        ctx.minibatch = minibatch
        ctx.output_gradients = output_gradients
        ctx.input_leaves = input_leaves
        return torch.empty((), device="cpu")  # nobody reads its value

    @staticmethod
    @not_compiled
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:
        output_gradients: _OutputGradients = ctx.output_gradients
        output_gradients.refuse_another_pass()
        minibatch: MiniBatch = ctx.minibatch
        ctx.minibatch = None  # the user may keep the output, and drop the pipeline
        inputs, leaves = minibatch.backward(output_gradients.take())
        input_gradients = [inputs[i][k] if inputs[i] else None for i, k in ctx.input_leaves]
        return (None, None, None, None, *input_gradients, *leaves)


class _Attach(Function):
    """The node of the outputs: its backward stores their gradients, and does not block."""

    @staticmethod
    def forward(
        ctx: Any,
        output_gradients: _OutputGradients,
        output_leaves: list[Leaf],
        tensors: list[Tensor],
        scalar: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.output_gradients = output_gradients
        ctx.output_leaves = output_leaves
        return tuple(tensors)

    @staticmethod
    @not_compiled
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        output_gradients: _OutputGradients = ctx.output_gradients
        output_gradients.refuse_another_pass()
        for (i, k), gradient in zip(ctx.output_leaves, gradients, strict=True):
            output_gradients.gradients[i][k] = gradient
        return (None, None, None, torch.zeros((), device="cpu"))


def _requiring_grad(flats: Sequence[FlatTree]) -> list[Leaf]:
    return [
        (i, k)
        for i, flat in enumerate(flats)
        for k, leaf in enumerate(flat.leaves)
        if requires_grad(leaf)
    ]
