"""A step of the caller whose outputs only the process of the last stage gets.

All processes run the caller's code up to its call of the pipeline, on the same values. There it
goes on in the process of the last stage, and ends in the others. These get a zero whose backward
runs that of their stages, for a loss whose value they are told.

Processes between the first stage and the last may be told of a call and not run the code. Then the
process of the first stage sends them the caller's values that their stages need.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_gpipe.core.data import FlatTree, requires_grad
from lightning_gpipe.core.layout import Layout
from lightning_gpipe.core.run.autograd_node import attach
from lightning_gpipe.core.run.backward.roots import graph_behind, root_of
from lightning_gpipe.core.run.minibatch import MiniBatch
from lightning_gpipe.core.schedules import Kind
from lightning_gpipe.core.transport import OutputElsewhere

_SECOND = (
    "a step must call the pipeline once, if only the last stage gets its output: got a second "
    "call, in which the other processes do not take part. Put both inputs into one batch, or write "
    "outputs='all'."
)
_EARLY = (
    "a step must not run backward or torch.autograd.grad through the pipeline, if only the last "
    "stage gets its output: the other processes take part in a backward after the step only. Write "
    "outputs='all'."
)


class StepAtLast:
    """A step of the caller in one process.

    Attributes:
        here: Whether the code goes on after its call.
        kinds: The kinds of the caller's actions in this process, with a loss for each micro-batch.
        told: Whether other processes than those of both ends are told of its present call.
    """

    def __init__(self, layout: Layout) -> None:
        self.here = layout.last_here
        here = {Kind.PREPARE: True, Kind.LOSS: self.here, Kind.BACKWARD: layout.first_here}
        self.kinds = frozenset(kind for kind, is_here in here.items() if is_here)
        self.called = self.told = False
        self.before_answer: Callable[[], None] = lambda: None
        self.zero: Tensor | None = None
        self._first_here = layout.first_here
        self._outputs: list[Tensor] = []
        self._minibatch: MiniBatch | None = None  # of its call

    def begin_call(self) -> None:
        """Begin the call of the pipeline; raise RuntimeError if it is the second one."""
        if self.called:
            raise RuntimeError(_SECOND)
        self.called = True

    def outputs(
        self, minibatch: MiniBatch, inputs: Sequence[FlatTree], outputs: Sequence[FlatTree]
    ) -> list[FlatTree]:
        """Return outputs in the caller's graph; raise OutputElsewhere if they go elsewhere."""
        if self.here:
            attached = attach(minibatch, inputs, outputs)
            leaves = (leaf for output in attached for leaf in output.leaves)
            self._outputs = list(filter(requires_grad, leaves))
            self._minibatch = minibatch
            minibatch.refusal = _EARLY
            return attached
        if torch.is_grad_enabled():
            zero = FlatTree([torch.zeros((), requires_grad=True)])
            # Their gradients go elsewhere, and the graph behind them would keep parameters.
            own = inputs if self._first_here else [_apart(x) for x in inputs]
            [[self.zero]] = (flat.leaves for flat in attach(minibatch, own, [zero]))
        raise OutputElsewhere

    def end(self) -> None:
        """Let the backward run, once the code has ended."""
        if self._minibatch is not None:
            self._minibatch.refusal = None
            self._minibatch = None

    def leads_to(self, loss: Tensor) -> bool:
        nodes = {output.grad_fn for output in self._outputs}
        return not nodes.isdisjoint(graph_behind([root_of(loss)])[1])


def _apart(inputs: FlatTree) -> FlatTree:
    """Return leaves of the same kind without a graph behind them."""
    leaves = [
        x.detach().requires_grad_() if isinstance(x, Tensor) and x.requires_grad else x
        for x in inputs.leaves
    ]
    return FlatTree(leaves, inputs.spec)
