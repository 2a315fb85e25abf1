"""The backwards of one pass through a stage.

Backward through a micro-batch's graph ends in the stage's inputs and shadows. But behind a captured
tensor it goes on into a graph that other micro-batches and the caller share: so that graph is kept,
and the gradients of its leaves are returned by the pipeline's node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_gpipe.core.data import apart
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
from lightning_gpipe.core.run.backward.split import Splits
from lightning_gpipe.core.run.backward.split_backward import SplitBackward
from lightning_gpipe.core.run.backward.sums import Pair, add_gradient
from lightning_gpipe.core.run.guards.lost_gradients import refuse_second_backward

_SEARCHES = 2  # the second, for what the first left


class StageBackward:
    """Runs the backwards of one pass, and collects the gradients of captured leaves.

    ``splits`` is None if backwards run at once, without B and W. ``searching`` is True if all
    graphs are searched, not only those of a behavior that needs it.
    """

    def __init__(self, used_leaves: UsedLeaves, splits: Splits | None = None) -> None:
        self._used_leaves = used_leaves
        self._splits = splits
        self.searching = used_leaves.searching
        self.any_captured = False
        self._gradients: dict[int, Pair] = {}  # a leaf and its gradient, by id
        self._pending: dict[int, SplitBackward] = {}  # by micro-batch, between B and W

    def record(
        self, behavior: Behavior, inputs: Sequence[Any], outputs: Sequence[Any], since: int
    ) -> None:
        """Record the leaves that take part in a micro-batch, and whether any was captured."""
        captured = self._used_leaves.record(outputs, inputs, captures=behavior.searching)
        if not behavior.searching:
            return
        # A tensor that a layer computes from its parameters, keeps, and uses for the next
        # micro-batches too, has a graph that the backward of each of them needs.
        any_captured = bool(captured) or revisits(map(root_of, outputs), since)
        self.any_captured |= any_captured
        behavior.searches += 1
        behavior.captures |= any_captured
        behavior.searching = behavior.captures or behavior.searches < _SEARCHES

    def run(
        self,
        i: int,
        inputs: Sequence[Any],
        roots: Sequence[Root | None],
        gradients: Sequence[Tensor | None],
    ) -> Sequence[Tensor]:
        """Run backward of micro-batch ``i``, or B of it; not split if others share its graph.

        Return the gradients with which W will begin, if there is one.
        """
        try:
            if self.any_captured:
                self._run_to_captured(roots, gradients)
                return ()
            if self._splits is not None:
                backward = SplitBackward.of(self._splits, inputs, roots, gradients)
                if backward is not None:
                    self._pending[i] = backward
                    backward.run_inputs()
                    return backward.entered
            run_backward(roots, gradients)
            return ()
        except RuntimeError as error:
            refuse_second_backward(error)
            raise

    def _run_to_captured(
        self, roots: Sequence[Root | None], gradients: Sequence[Tensor | None]
    ) -> None:
        leaves = leaves_behind(roots)
        found = zip(leaves, gradients_of(leaves, roots, gradients), strict=True)
        pairs = [(leaf, gradient) for leaf, gradient in found if gradient is not None]
        captured = [pair for pair in pairs if self._used_leaves.captured(pair[0])]
        own = apart((gradient for _, gradient in captured), gradients)  # for sums in place
        for (leaf, _), gradient in zip(captured, own, strict=True):
            add_gradient(self._gradients, leaf, gradient)
        for leaf, gradient in pairs:
            if not self._used_leaves.captured(leaf):
                # By autograd, which lets the thread of no other stage come between.
                run_backward([root_of(leaf)], [gradient])

    def run_weights(self, i: int) -> Sequence[Tensor]:
        """Run W of micro-batch ``i``, if it waits; return the gradients with which it began."""
        if (backward := self._pending.pop(i, None)) is None:
            return ()
        entered = backward.entered
        try:
            backward.run_weights()
            return entered
        except RuntimeError as error:
            refuse_second_backward(error)
            raise

    def kept_for_weights(self, i: int) -> list[Tensor]:
        return list(self._pending[i].kept()) if i in self._pending else []

    def clear(self) -> None:
        self._pending.clear()

    def take_gradients(self) -> list[Pair]:
        pairs = list(self._gradients.values())
        self._gradients.clear()
        return pairs
