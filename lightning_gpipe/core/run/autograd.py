"""The pipeline as one ordinary node in the caller's graph.

The node's inputs are the micro-batches and the parameters, its outputs those of the micro-batches.
Its backward runs the backward phase of the schedule and returns each parameter's gradient once, so
whatever works on gradients elsewhere works here: hooks, gradient scalers, data parallelism,
``torch.autograd.grad(loss, parameters)``.

# Note [The blocking node must be a CPU node]
The node's backward waits for workers that run backward themselves. PyTorch's engine has one thread
per CUDA device for the whole process, and a node whose outputs are on a device runs on that
device's thread; to block it there would starve the very workers that it waits for. So there are two
nodes. The blocking one (:class:`_Run`) has a CPU scalar for its only output, and therefore runs on
the thread that called ``backward()``. A second one (:class:`_Attach`) ties the real outputs to that
scalar, and in backward does no more than note their gradients::

    micro-batches, parameters --> _Run --(scalar on CPU)--> _Attach --> outputs

Where backward() is called within a backward, by `torch.utils.checkpoint` with use_reentrant=True
say, that thread may be a device's after all. Then nothing may block it: the backward phase runs
on it, in the schedule's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from lightning_gpipe.core.data import FlatTree, copy_marks
from lightning_gpipe.core.run.minibatch import Gradients, MiniBatch

Leaf = tuple[int, int]  # micro-batch i, the index of the leaf


def attach(
    minibatch: MiniBatch, inputs: Sequence[FlatTree], outputs: Sequence[FlatTree]
) -> list[FlatTree]:
    """Give ``outputs`` a gradient function that runs the mini-batch's backward phase.

    Args:
        minibatch: The mini-batch, its forward done.
        inputs: The micro-batches, as they are in the caller's graph.
        outputs: The outputs of the micro-batches, in no graph.

    Returns:
        The outputs in the caller's graph. A second backward through them, and one with
        ``create_graph=True``, raise RuntimeError.
    """
    exits = _requiring_grad(outputs)
    if not exits:
        return list(outputs)
    entries = _requiring_grad(inputs)
    sources = [inputs[i].leaves[k] for i, k in entries] + minibatch.parameters
    # The anchor lets backward run for leaves too that a layer hides from nn.Module.
    anchor = torch.zeros((), device="cpu", requires_grad=True)
    arriving = _Arriving(outputs)
    scalar = _Run.apply(minibatch, arriving, entries, anchor, *sources)
    tensors = [outputs[i].leaves[k].detach() for i, k in exits]
    attached = _Attach.apply(arriving, exits, tensors, scalar)

    result = [FlatTree(list(leaves), spec) for leaves, spec in outputs]
    for (i, k), tensor in zip(exits, attached, strict=True):
        result[i].leaves[k] = copy_marks(outputs[i].leaves[k], tensor)
    return result


class _Arriving:
    """The gradients of the outputs, on their way from one node to the other.

    Attributes:
        gradients: For each micro-batch, those of its output's leaves.
        spent: Whether they were taken.
    """

    def __init__(self, outputs: Sequence[FlatTree]) -> None:
        self.gradients: list[Gradients] = [[None] * len(output.leaves) for output in outputs]
        self.spent = False

    def take(self) -> list[Gradients]:
        """The gradients, which are let go of here."""
        taken, self.gradients, self.spent = self.gradients, [], True
        return taken

    def refuse_another_pass(self) -> None:
        """Raise where backward would have to run a second time, or to be differentiated."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a pipeline cannot be differentiated twice: got a backward with "
                "create_graph=True. Compute what needs it, such as a gradient penalty, on the "
                "plain module."
            )
        if self.spent:
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
        arriving: _Arriving,
        entries: list[Leaf],
        anchor: Tensor,
        *sources: Tensor,
    ) -> Tensor:
        ctx.minibatch = minibatch
        ctx.arriving = arriving
        ctx.entries = entries
        return torch.zeros((), device="cpu")

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:
        arriving: _Arriving = ctx.arriving
        arriving.refuse_another_pass()
        inputs, parameters = ctx.minibatch.backward(arriving.take())
        entering = [inputs[i][k] if inputs[i] else None for i, k in ctx.entries]
        return (None, None, None, None, *entering, *parameters)


class _Attach(Function):
    """The outputs: its backward notes their gradients, and waits for nothing."""

    @staticmethod
    def forward(
        ctx: Any, arriving: _Arriving, exits: list[Leaf], tensors: list[Tensor], scalar: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.arriving = arriving
        ctx.exits = exits
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        arriving: _Arriving = ctx.arriving
        arriving.refuse_another_pass()
        for (i, k), gradient in zip(ctx.exits, gradients, strict=True):
            arriving.gradients[i][k] = gradient
        return (None, None, None, torch.zeros((), device="cpu"))


def _requiring_grad(flats: Sequence[FlatTree]) -> list[Leaf]:
    return [
        (i, k)
        for i, flat in enumerate(flats)
        for k, leaf in enumerate(flat.leaves)
        if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
