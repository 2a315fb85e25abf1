"""Gradients of the tensors that a stage's layers captured from outside, on one pass through it.

Backward through a micro-batch's graph ends in the stage's inputs and shadows. If the layers
captured a tensor, it goes on into the graph behind that tensor, which other micro-batches and the
caller share: so that graph must be kept, and the gradients of its leaves belong to the pipeline's
node, which returns their sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_gpipe.core.faithful import Behavior
from lightning_gpipe.core.run.asides import explain_second_backward
from lightning_gpipe.core.run.gradients import add_gradient
from lightning_gpipe.core.run.participation import Participation
from lightning_gpipe.core.run.roots import (
    Root,
    gradients_of,
    leaves_behind,
    revisits,
    root_of,
    run_backward,
)
from lightning_gpipe.core.run.weights import Weights

_SEARCHES = 2  # the second, for what the first left


class Captures:
    """What one pass has captured from outside, and the gradients.

    Args:
        participation: Where to record which leaves take part.
        weights: Runs backwards in two parts; None to run them at once.

    Attributes:
        searching: Whether all graphs are searched, not only those of a behavior that needs it.
    """

    def __init__(self, participation: Participation, weights: Weights | None = None) -> None:
        self._participation = participation
        self._weights = weights
        self.searching = participation.searching
        self._any = False
        self._gradients: dict[int, tuple[Tensor, Tensor]] = {}  # a leaf and its gradient, by id

    def record(
        self, behavior: Behavior, inputs: Sequence[Any], outputs: Sequence[Any], since: int
    ) -> None:
        """Record which leaves take part in a micro-batch, and whether any was captured.

        There is nothing to record unless all graphs are searched, or those of this behavior.

        Args:
            behavior: The layers' behavior.
            inputs: The inputs.
            outputs: The outputs.
            since: The time before the layers ran.

        Raises:
            RuntimeError: If a captured tensor cannot have a gradient.
        """
        found = self._participation.record(outputs, inputs, captures=behavior.searching)
        if not behavior.searching:
            return
        # Of what a layer computes from its parameters, keeps, and uses for the next micro-batches
        # too, the graph is needed for each of them, as the plain module needs it for all rows.
        any_captured = bool(found) or revisits(map(root_of, outputs), since)
        self._any |= any_captured
        behavior.searches += 1
        behavior.captures |= any_captured
        behavior.searching = behavior.captures or behavior.searches < _SEARCHES

    def run_backward(
        self,
        i: int,
        inputs: Sequence[Any],
        roots: Sequence[Root | None],
        gradients: Sequence[Tensor | None],
    ) -> None:
        """Run backward of micro-batch ``i``; the gradients of captured leaves are added up here.

        That of a graph which others share is not split.
        """
        if not self._any:
            try:
                if self._weights is None:
                    run_backward(roots, gradients)
                else:
                    self._weights.run_backward(i, inputs, roots, gradients)
            except RuntimeError as error:
                explain_second_backward(error)
                raise
            return
        leaves = leaves_behind(roots)
        for leaf, gradient in zip(leaves, gradients_of(leaves, roots, gradients), strict=True):
            if gradient is None:
                continue
            if self._participation.captured(leaf):
                add_gradient(self._gradients, leaf, gradient)
            else:  # by autograd, which lets the thread of no other stage come between
                run_backward([root_of(leaf)], [gradient])

    def run_weights(self, i: int) -> None:
        """Run what backward of micro-batch ``i`` has left."""
        if self._weights is not None:
            try:
                self._weights.run(i)
            except RuntimeError as error:
                explain_second_backward(error)
                raise

    def kept_for_weights(self, i: int) -> list[Tensor]:
        """What is kept for what backward of micro-batch ``i`` has left."""
        return [] if self._weights is None else self._weights.kept(i)

    def clear(self) -> None:
        """Forget what backwards have left."""
        if self._weights is not None:
            self._weights.clear()

    def take_gradients(self) -> list[tuple[Tensor, Tensor]]:
        """The leaves and their gradients, no longer held here."""
        taken = list(self._gradients.values())
        self._gradients.clear()
        return taken
