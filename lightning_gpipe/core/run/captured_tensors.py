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
from lightning_gpipe.core.run.backward.leaves import UsedLeaves
from lightning_gpipe.core.run.backward.roots import (
    Root,
    gradients_of,
    leaves_behind,
    revisits,
    root_of,
    run_backward,
)
from lightning_gpipe.core.run.backward.sums import add_gradient
from lightning_gpipe.core.run.backward.weight_gradients import WeightGradients
from lightning_gpipe.core.run.guards.lost_gradients import explain_second_backward

_SEARCHES = 2  # the second, for what the first left


class CapturedTensors:
    """Runs the backwards of one pass, and collects the gradients of captured leaves.

    Args:
        used_leaves: Records which leaves took part.
        weights: Runs backwards in two parts; None to run them at once.

    Attributes:
        searching: Whether all graphs are searched, not only those of a behavior that needs it.
    """

    def __init__(self, used_leaves: UsedLeaves, weights: WeightGradients | None = None) -> None:
        self._used_leaves = used_leaves
        self._weights = weights
        self.searching = used_leaves.searching
        self._any = False
        self._gradients: dict[int, tuple[Tensor, Tensor]] = {}  # a leaf and its gradient, by id

    def record(
        self, behavior: Behavior, inputs: Sequence[Any], outputs: Sequence[Any], since: int
    ) -> None:
        """Record which leaves take part in a micro-batch, and whether any was captured.

        Raises:
            RuntimeError: If a captured tensor cannot have a gradient.
        """
        captured = self._used_leaves.record(outputs, inputs, captures=behavior.searching)
        if not behavior.searching:
            return
        # A tensor that a layer computes from its parameters, keeps, and uses for the next
        # micro-batches too, has a graph that the backward of each of them needs.
        any_captured = bool(captured) or revisits(map(root_of, outputs), since)
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
        """Run backward of micro-batch ``i``, not split if others share its graph."""
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
            if self._used_leaves.captured(leaf):
                add_gradient(self._gradients, leaf, gradient)
            else:  # by autograd, which lets the thread of no other stage come between
                run_backward([root_of(leaf)], [gradient])

    def run_weights(self, i: int) -> None:
        """Run the rest of the backward of micro-batch ``i``."""
        if self._weights is None:
            return
        try:
            self._weights.run(i)
        except RuntimeError as error:
            explain_second_backward(error)
            raise

    def kept_for_weights(self, i: int) -> list[Tensor]:
        """Return the tensors kept for :meth:`run_weights`."""
        return [] if self._weights is None else self._weights.kept(i)

    def clear(self) -> None:
        """Drop the rests of backwards."""
        if self._weights is not None:
            self._weights.clear()

    def take_gradients(self) -> list[tuple[Tensor, Tensor]]:
        """Return the captured leaves with their gradients, and drop them here."""
        pairs = list(self._gradients.values())
        self._gradients.clear()
        return pairs
