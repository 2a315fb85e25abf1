"""The parameters around a pipeline, while their code runs micro-batch by micro-batch.

Their parameters get shadows as parameters of stages do, which gather the gradients of all
micro-batches. The caller's code may also use leaves that no module around has: a parameter in a
list, or one of a layer in the pipeline for a penalty on its weights. Backward would write their
gradients into ``.grad``, so the graphs are searched for such leaves, and their gradients are kept
apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpipe.core.faithful import Journal, Manager, Shadows
from lightning_gpipe.core.run.backward.roots import (
    Root,
    gradients_of,
    graph_behind,
    root_of,
    run_backward,
)
from lightning_gpipe.core.run.backward.sums import add_gradient

Pair = tuple[Tensor, Tensor]  # a leaf and its gradient


class OutsideParameters:
    """The parameters around the stages, for one mini-batch.

    Attributes:
        foreign: By id, leaves that no module around has, with their gradients.
    """

    def __init__(
        self, modules: Iterable[nn.Module], device: torch.device, journal: Journal
    ) -> None:
        journal.reset()  # changes that an interrupted mini-batch left
        self._journal = journal
        self._shadows = Shadows(modules, grad=True, device=device, recomputed=False)
        self._own = {id(self._shadows.shadow_of(each)) for each in self._shadows.parameters}
        self.foreign: dict[int, Pair] = {}

    def entered(self) -> Manager:
        """Put the shadows in the parameters' slots for the duration of a ``with`` block."""
        return self._shadows.swapped_in(self._journal)

    def undo(self) -> None:
        """Undo what an interrupted ``with`` block has left."""
        self._journal.undo()

    def backward(
        self,
        roots: Sequence[Root | None],
        gradients: Sequence[Tensor | None],
        *,
        ends: Iterable[Tensor] = (),
        keep: Callable[[set[Any]], bool] = lambda nodes: False,
    ) -> None:
        """Run backward through the caller's graph of one micro-batch.

        Args:
            roots: The roots.
            gradients: The gradients of the roots.
            ends: Leaves that accumulate their gradients themselves.
            keep: Tells from the nodes of the graph whether another backward needs it.
        """
        leaves, nodes = graph_behind(roots)
        own = self._own.union(map(id, ends))
        foreign = [leaf for leaf in leaves if id(leaf) not in own]
        if not foreign:
            run_backward(roots, gradients, keep=keep(set(nodes)))
            return
        for leaf in foreign:
            _check_hooks(leaf)
        pairs = zip(leaves, gradients_of(leaves, roots, gradients), strict=True)
        for leaf, gradient in pairs:
            if gradient is None:
                continue
            if id(leaf) in own:
                run_backward([root_of(leaf)], [gradient])
            else:
                add_gradient(self.foreign, leaf, gradient)

    def take_gradients(self) -> list[Pair]:
        """Return the parameters with the sums of their gradients, and drop these here."""
        return list(self._shadows.take_gradients())


def _check_hooks(leaf: Tensor) -> None:
    if leaf._backward_hooks:
        raise RuntimeError(
            "a tensor that training_step uses, and no module around the pipeline has, must have no "
            f"hooks: one of shape {tuple(leaf.shape)} has a hook on its gradient, which would be "
            "called for each micro-batch. Make it a parameter of a module around the pipeline, or "
            "write schedule='fill_drain'."
        )
