"""The pipeline as one ordinary node in the caller's graph.

Its backward runs the backward phase of the schedule and returns each parameter's gradient once, so
hooks, gradient scalers, data parallelism and ``torch.autograd.grad(loss, parameters)`` work.

# Note [The blocking node must be a CPU node]
The node's backward waits for workers that run backward themselves. PyTorch's engine has one thread
per CUDA device for the whole process, and a node whose outputs are on a device runs on that
device's thread; blocking that thread would starve the workers that the node waits for. So there are
two nodes. The blocking one (:class:`_Sources`) has a CPU scalar as its only output, and therefore
runs on the thread that called ``backward()``. A second one (:class:`_Outputs`) connects the real
outputs to that scalar, and its backward only stores their gradients::

    micro-batches, parameters --> _Sources --(scalar on CPU)--> _Outputs --> outputs

If backward() is called within another backward, as by `torch.utils.checkpoint` with
use_reentrant=True, that thread may be a device's thread after all. It must not be blocked, so the
backward phase then runs on it, in the schedule's order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function

from lightning_gpipe.core.data import FlatTree, copy_marks, requires_grad
from lightning_gpipe.core.faithful import has_hooks, not_compiled
from lightning_gpipe.core.run.backward.roots import REENTRANT, is_leaf
from lightning_gpipe.core.run.backward.sums import Gradients
from lightning_gpipe.core.run.guards.lost_gradients import is_written
from lightning_gpipe.core.run.minibatch import MiniBatch

Compute = Callable[[Sequence[Tensor | None]], Iterable[Tensor | None]]

_TWICE = (
    "a pipeline cannot be differentiated twice: got a backward with create_graph=True. For what "
    "needs it, such as a gradient penalty, run the layers one by one: for layer in self.layers: "
    "x = layer(x)."
)
_AGAIN = (
    "backward must run once through a pipeline's output: got a second one. The first frees the "
    "activations, with retain_graph=True too. Add the losses up before backward, or run the "
    "forward again."
)


class BackwardOnce:
    """The backward of a pair of nodes, which runs once.

    ``compute`` is None if it must not run yet, or has run. ``twice`` is the message for a backward
    that is to be differentiated, ``again`` for a second or an early one.
    """

    def __init__(self, compute: Compute | None, twice: str = _TWICE, again: str = _AGAIN) -> None:
        self.gradients: Sequence[Tensor | None] = ()
        self.compute = compute
        self._twice, self._again = twice, again

    def check(self) -> None:
        """Raise if backward would have to run a second time, or to be differentiated."""
        if torch.is_grad_enabled():
            raise RuntimeError(self._twice)
        if self.compute is None:
            raise RuntimeError(self._again)

    def run(self) -> Iterable[Tensor | None]:
        compute, self.compute = self.compute, None  # the user may keep the output alone
        gradients, self.gradients = self.gradients, ()
        assert compute is not None, "it runs once"
        return compute(gradients)


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
    """Return the outputs in the caller's graph; their backward runs the second phase, once."""
    leaves = _Leaves.among(outputs)
    if not leaves.places:
        return list(outputs)
    input_leaves = _Leaves.among(inputs)
    # The anchor makes backward run even if only tensors that nn.Module does not know need it.
    anchor = torch.empty((), device="cpu", requires_grad=True)
    phase = partial(_run_backward_phase, minibatch, anchor, input_leaves.places, leaves)
    backward = BackwardOnce(phase)
    sources = [anchor, *input_leaves.of(inputs), *minibatch.leaves]
    return leaves.replaced(outputs, connect(backward, sources, leaves.detached(outputs)))


def _run_backward_phase(
    minibatch: MiniBatch,
    anchor: Tensor,
    input_leaves: Sequence[tuple[int, int]],
    output_leaves: _Leaves,
    gradients: Sequence[Tensor | None],
) -> Gradients:
    to_all = is_written(anchor)
    inputs, leaves = minibatch.backward(output_leaves.gradients(gradients), to_all=to_all)
    of_inputs = [inputs[i][k] if inputs[i] else None for i, k in input_leaves]
    return [None, *of_inputs, *leaves]


def leaves_around(loss: Tensor) -> list[Tensor] | None:
    """Return the leaves that backward from a loss reaches outside of the pipeline's only node.

    None if there is no such node, or another one, or a backward within the backward.
    """
    leaves: list[Tensor] = []
    nodes = 0
    waiting: list[Any] = [loss.grad_fn]
    seen = {None, *waiting}
    while waiting:
        node = waiting.pop()
        if type(node).__name__ == REENTRANT:
            return None
        after = [child for child, _ in node.next_functions]
        if type(node) is _Sources._backward_cls:
            nodes += 1
            # Each leaf of the stages is there once; one that is an input as well, twice.
            times = Counter(after)
            after = [child for child in after if not is_leaf(child) or times[child] > 1]
        new = [child for child in dict.fromkeys(after) if child not in seen]
        seen.update(new)
        leaves += [child.variable for child in new if is_leaf(child)]
        waiting += [child for child in new if not is_leaf(child)]
    return leaves if nodes == 1 else None


HOOK_CALLED_TWICE = (
    "a hook on a gradient must see all of it: got one on a value that goes into the pipeline, and "
    "that training_step uses beside it, too, as in a residual connection. With a loss for each "
    "micro-batch it would be called for each part. Write schedule='fill_drain'."
)


class StepOutputs:
    """The outputs of one micro-batch, in which the graph of the caller's code ends.

    Asking autograd for the gradients of ``sources``, leaves that the outputs depend on, raises
    ``refusal``. ``end`` has that graph's last leaf and node, if an output requires a gradient.
    """

    def __init__(self, outputs: FlatTree, sources: Iterable[Tensor], refusal: str) -> None:
        self._leaves = leaves = _Leaves.among([outputs])
        self._sums: Gradients = [None] * len(leaves.places)
        self._backward = BackwardOnce(None, refusal, refusal)
        self.end: tuple[Tensor, Any] | None = None
        self.outputs = outputs
        if leaves.places:
            anchor = torch.zeros((), device="cpu", requires_grad=True)
            tensors = _Outputs.apply(self._backward, leaves.detached([outputs]), anchor, *sources)
            self.end = anchor, tensors[0].grad_fn
            [self.outputs] = leaves.replaced([outputs], tensors)

    def allow_backward(self) -> None:
        """Let a backward go through the outputs, once the caller's code has ended."""
        self._backward.compute = list  # nothing is behind the anchor

    def add_up(self) -> None:
        """Add the gradients of the latest backward, which another one may follow."""
        gradients, self._backward.gradients = self._backward.gradients, ()
        for k, gradient in enumerate(gradients):
            if gradient is None:
                continue
            before = self._sums[k]
            if before is None:
                self._sums[k] = gradient
                continue
            if has_hooks(self._leaves.of([self.outputs])[k]):
                raise RuntimeError(HOOK_CALLED_TWICE)
            self._sums[k] = before + gradient

    def take_gradients(self) -> Gradients:
        self._backward.compute = None
        [gradients] = self._leaves.gradients(self._sums)
        return gradients


class _Leaves(NamedTuple):
    """The micro-batch and the index of each leaf that requires a gradient."""

    places: Sequence[tuple[int, int]]
    sizes: Sequence[int]

    @classmethod
    def among(cls, flats: Sequence[FlatTree]) -> _Leaves:
        places = [
            (i, k)
            for i, flat in enumerate(flats)
            for k, leaf in enumerate(flat.leaves)
            if requires_grad(leaf)
        ]
        return cls(places, [len(flat.leaves) for flat in flats])

    def of(self, flats: Sequence[FlatTree]) -> list[Tensor]:
        return [flats[i].leaves[k] for i, k in self.places]

    def detached(self, outputs: Sequence[FlatTree]) -> list[Tensor]:
        """Return the leaves in no graph; no autograd function can return some nested tensors."""
        leaves = [leaf.detach() for leaf in self.of(outputs)]
        for leaf in leaves:
            if leaf.is_nested and leaf.layout is torch.strided:
                raise ValueError(
                    "outputs of a pipeline that require gradients must be dense: got a nested "
                    "tensor. Return it padded, with torch.nested.to_padded_tensor(x, 0.0)."
                )
        return leaves

    def replaced(self, outputs: Sequence[FlatTree], tensors: Sequence[Tensor]) -> list[FlatTree]:
        result = [FlatTree(list(leaves), spec) for leaves, spec in outputs]
        for (i, k), tensor in zip(self.places, tensors, strict=True):
            result[i].leaves[k] = copy_marks(outputs[i].leaves[k], tensor)
        return result

    def gradients(self, gradients: Sequence[Tensor | None]) -> list[Gradients]:
        result: list[Gradients] = [[None] * size for size in self.sizes]
        for (i, k), gradient in zip(self.places, gradients, strict=False):
            result[i][k] = gradient
        return result


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
        backward.check()
        return (None, *backward.run())


class _Outputs(Function):
    """The node of the outputs, whose backward stores their gradients without blocking."""

    @staticmethod
    def forward(
        ctx: Any, backward: BackwardOnce, outputs: Sequence[Tensor], *sources: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.backward_once = backward
        return tuple(outputs)

    @staticmethod
    @not_compiled
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        backward: BackwardOnce = ctx.backward_once
        backward.check()
        backward.gradients = gradients
        others = [None] * (len(ctx.needs_input_grad) - 3)
        return (None, None, torch.zeros((), device="cpu"), *others)
