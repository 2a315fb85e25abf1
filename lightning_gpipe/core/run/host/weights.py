"""Weights that live in the memory of the host, and are on a device only around their use.

The caller may change the weights after a phase, so the host waits for the copies at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from lightning_gpipe.core.data import record_stream
from lightning_gpipe.core.faithful import Shadows
from lightning_gpipe.core.layout import HOST
from lightning_gpipe.core.run.backward.sums import Pair
from lightning_gpipe.core.run.host.side_copies import SideCopies
from lightning_gpipe.core.run.host.visiting_weights import VisitingWeights
from lightning_gpipe.core.run.stage import Stage


class HostWeights(VisitingWeights):
    """The weights of one stage on a GPU in one mini-batch, whose home is the host."""

    def __init__(self, stage: Stage, shadows: Shadows) -> None:
        super().__init__(stage, shadows)
        self._copies = SideCopies(stage.device)

    @override
    def _bring(self) -> Callable[[], None]:
        for _, at_home, copy in self._parts:
            copy.data = torch.empty_like(at_home, device=self._device, requires_grad=False)
        with self._copies.beside("to the device"):
            for _, at_home, copy in self._parts:
                copy.data.copy_(at_home.detach(), non_blocking=True)
        event = self._copies.latest
        return lambda: torch.cuda.current_stream(self._device).wait_event(event)

    @override
    def bring_home(self, pairs: Sequence[Pair]) -> list[Pair]:
        at_home = []
        with self._copies.beside("to the host") as stream:
            for weight, gradient in pairs:
                if weight.device == HOST != gradient.device:
                    on_device, gradient = gradient, _to_host(gradient)
                    record_stream(on_device, stream)
                at_home.append((weight, gradient))
        return at_home

    @override
    def settle(self) -> None:
        self._copies.settle()


def _to_host(gradient: Tensor) -> Tensor:
    if gradient.layout is not torch.strided:
        return gradient.cpu()
    at_home = torch.empty_like(gradient, device="cpu", pin_memory=True)
    return at_home.copy_(gradient, non_blocking=True)
