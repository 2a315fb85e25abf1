"""Weights of which a replica keeps a share, and has the others only around their use."""

from __future__ import annotations

from collections.abc import Callable

from typing_extensions import override

from lightning_gpipe.core.faithful import Shadows
from lightning_gpipe.core.run.divided_weights import DividedWeights
from lightning_gpipe.core.run.host.visiting_weights import VisitingWeights
from lightning_gpipe.core.run.stage import Stage


class GatheredWeights(VisitingWeights):
    """The weights of one stage in one mini-batch, gathered from the replicas that keep them."""

    def __init__(self, stage: Stage, shadows: Shadows, divided: DividedWeights) -> None:
        super().__init__(stage, shadows)
        self._divided = divided
        self._leaves = {id(weight): leaf for weight, leaf in shadows.pairs}

    @override
    def _bring(self) -> Callable[[], None]:
        return self._divided.gather(self._stage.partition.index, self._leaves)

    @override
    def settle(self) -> None:
        pass  # the host waits for what comes before it is used
