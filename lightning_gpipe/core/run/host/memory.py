"""The part of one pass through a stage that is elsewhere: on the host, or in other replicas."""

from __future__ import annotations

import torch

from lightning_gpipe.core.faithful import NO_HOOKS, Context, Manager, Shadows
from lightning_gpipe.core.run.host.gathered_weights import GatheredWeights
from lightning_gpipe.core.run.host.visiting_weights import VisitingWeights
from lightning_gpipe.core.run.host.waiting_activations import HostActivations
from lightning_gpipe.core.run.host.weights import HostWeights
from lightning_gpipe.core.run.stage import Stage


class HostMemory:
    """The part of one pass that is on its device only around its use: weights and activations."""

    weights: VisitingWeights | None = None

    def __init__(self, stage: Stage, shadows: Shadows) -> None:
        if stage.divided is not None:
            self.weights = GatheredWeights(stage, shadows, stage.divided)
        elif stage.on_host:
            self.weights = HostWeights(stage, shadows)
        self.activations = HostActivations(stage) if stage.offloads else None

    def saving(self, context: Context, i: int, *, at_once: bool = False) -> Manager:
        """Apply hooks to what autograd saves for micro-batch ``i`` in a ``with`` block.

        If the backward comes ``at_once``, activations stay. If the caller has hooks, these decide.
        """
        hooks = context.saved_tensors_hooks
        if hooks is None:
            hooks = NO_HOOKS
            if self.activations is not None and not at_once:
                hooks = self.activations.around(i, hooks)
        if self.weights is not None:
            hooks = self.weights.around(hooks)
        return torch.autograd.graph.saved_tensors_hooks(*hooks)

    def settle(self) -> None:
        for each in (self.weights, self.activations):
            if each is not None:
                each.settle()
