"""The pipeline as one ordinary node in the caller's graph.

The node's inputs are the micro-batches and the parameters, its outputs those of the micro-batches.
Its backward runs the backward half of the schedule and returns each parameter's gradient once, so
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
say, that thread may be a device's after all. Then nothing may block it: the backward half runs on
it, in the schedule's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from lightning_gpipe.core.data import FlatTree, carry
from lightning_gpipe.core.run.minibatch import Gradients, MiniBatch

Place = tuple[int, int]  # micro-batch i, leaf k


def attach(
    minibatch: MiniBatch, inputs: Sequence[FlatTree], outputs: Sequence[FlatTree]
) -> list[FlatTree]:
    """Give ``outputs`` a gradient function that runs the mini-batch's backward half.

    Args:
        minibatch: The mini-batch, its forward half done.
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
    scalar = _Run.apply(minibatch, entries, anchor, *sources)
    tensors = [outputs[i].leaves[k].detach() for i, k in exits]
    attached = _Attach.apply(minibatch, exits, tensors, scalar)

    result = [FlatTree(list(leaves), spec) for leaves, spec in outputs]
    for (i, k), tensor in zip(exits, attached, strict=True):
        result[i].leaves[k] = carry(outputs[i].leaves[k], tensor)
    return result


class _Run(Function):
    """The blocking node: its backward runs the backward half."""

    @staticmethod
    def forward(
        ctx: Any, minibatch: MiniBatch, entries: list[Place], anchor: Tensor, *sources: Tensor
    ) -> Tensor:
        ctx.minibatch = minibatch
        entering = sources[: len(entries)]
        ctx.entries = [(i, k, x.device) for (i, k), x in zip(entries, entering, strict=True)]
        return torch.zeros((), device="cpu")

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:
        minibatch: MiniBatch = ctx.minibatch
        _refuse_another_pass(minibatch)
        try:
            gradients = minibatch.backward()
            with minibatch.on_streams():
                entering = [_on(device, gradients[i], k) for i, k, device in ctx.entries]
                parameters = minibatch.take_gradients()
        finally:
            minibatch.release()
        return (None, None, None, *entering, *parameters)


class _Attach(Function):
    """The outputs: its backward notes their gradients, and waits for nothing."""

    @staticmethod
    def forward(
        ctx: Any, minibatch: MiniBatch, exits: list[Place], tensors: list[Tensor], scalar: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.minibatch = minibatch
        ctx.exits = exits
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        _refuse_another_pass(ctx.minibatch)
        for (i, k), gradient in zip(ctx.exits, gradients, strict=True):
            ctx.minibatch.note_gradient(i, k, gradient)
        return (None, None, None, torch.zeros((), device="cpu"))


def _refuse_another_pass(minibatch: MiniBatch) -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "a pipeline cannot be differentiated twice: got a backward with create_graph=True. "
            "Compute what needs it, such as a gradient penalty, on the plain module."
        )
    if minibatch.spent:
        raise RuntimeError(
            "backward must run once through a pipeline's output: got a second one. The first "
            "frees the activations, with retain_graph=True too. Add the losses up before backward, "
            "or run the forward again."
        )


def _on(device: torch.device, gradients: Gradients, k: int) -> Tensor | None:
    """The gradient of leaf ``k`` on ``device``, if it has one."""
    gradient = gradients[k] if gradients else None
    return None if gradient is None else gradient.to(device)


def _requiring_grad(flats: Sequence[FlatTree]) -> list[Place]:
    return [
        (i, k)
        for i, flat in enumerate(flats)
        for k, leaf in enumerate(flat.leaves)
        if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
