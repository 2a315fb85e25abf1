"""The leaves that took part in a mini-batch: parameters, and tensors captured from outside.

Autograd calls a hook on a parameter only if that has a gradient. The pipeline's node has all
parameters as inputs, so hooks on unused parameters would be called with None. So if any parameter
has a hook, the graphs of all micro-batches are searched for shadows.

A layer may also use a tensor that is neither its input nor a parameter of its stage, such as a
scale from another network. Autograd would write the gradients of such leaves itself, also under
``torch.autograd.grad``, and free the graph that all micro-batches share after the first of them. So
the leaves behind it are further inputs of the pipeline's node. The first runs of each call
signature are searched for them, and later runs only if there were some.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from lightning_gpipe.core.faithful import Shadows, has_hooks
from lightning_gpipe.core.run.backward.roots import leaves_behind, root_of


class UsedLeaves:
    """The leaves that took part in one mini-batch; used from several threads."""

    def __init__(self, shadows: Sequence[Shadows], *, spread: bool = False) -> None:
        self._shadows = shadows
        self._spread = spread
        self.searching = any(has_hooks(*each.parameters) for each in shadows)
        self._used: set[int] = set()
        self._captured: dict[int, Tensor] = {}

    def record(
        self, outputs: Iterable[Any], inputs: Iterable[Any], *, captures: bool
    ) -> Sequence[Tensor]:
        """Return the captured leaves that outputs depend on, if the stage may have some."""
        if not (self.searching or captures):
            return ()
        leaves = {id(leaf): leaf for leaf in leaves_behind(map(root_of, outputs))}
        self._used.update(leaves)
        own = self._own.union(map(id, inputs))
        captured = {key: leaf for key, leaf in leaves.items() if key not in own}
        self._captured.update(captured)
        for leaf in filter(self.foreign, captured.values()):  # its gradient would be wrong
            self._check_foreign(leaf)
        return list(captured.values())

    def _check_foreign(self, leaf: Tensor) -> None:
        if self._spread:  # processes without the layer have no gradient for it
            raise RuntimeError(
                "layers in a pipeline over processes must be given the tensors that require a "
                f"gradient: one uses a tensor of shape {tuple(leaf.shape)} that it was not given. "
                "Pass it with the input, marked by whole(tensor), or make it a parameter of the "
                "layer."
            )
        if leaf._backward_hooks:
            raise RuntimeError(
                "a tensor that a layer uses without being given it must have no hooks: one of "
                f"shape {tuple(leaf.shape)} has a hook on its gradient, which would be called for "
                "each micro-batch. Pass it with the input, marked by whole(tensor)."
            )

    def captured(self, leaf: Tensor) -> bool:
        return id(leaf) in self._captured

    @property
    def foreign_leaves(self) -> list[Tensor]:
        return [leaf for leaf in self._captured.values() if self.foreign(leaf)]

    def foreign(self, leaf: Tensor) -> bool:
        return all(leaf is not p for each in self._shadows for p in each.parameters)

    def leaves(self, shared: Iterable[nn.Parameter] = ()) -> list[Tensor]:
        """Return the used and ``shared`` parameters that have values here, and captured leaves."""
        leaves: dict[int, Tensor] = {id(each): each for each in shared if each.requires_grad}
        for shadows in self._shadows:
            used = shadows.parameters
            if self.searching:
                used = [each for each in used if id(shadows.shadow_of(each)) in self._used]
            leaves |= {id(each): each for each in used if not each.is_meta}
        return list((leaves | self._captured).values())

    @cached_property
    def _own(self) -> set[int]:
        return {
            id(shadows.shadow_of(parameter))
            for shadows in self._shadows
            for parameter in shadows.parameters
        }
