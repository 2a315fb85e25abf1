"""The shares of a stage that its device has while other stages run.

All of it, unless the weights are on the host, or replicas have divided something. Divided weights
are whole for the stage at work and the next one, and gradients until those of a stage are complete.
"""

from __future__ import annotations

from typing import NamedTuple

from lightning_gpipe.core.layout import SHARDINGS
from lightning_gpipe.core.planner.settings import PlannedSettings


class HeldShares(NamedTuple):
    """The shares of parameters, gradients and optimizer states."""

    parameters: float
    gradients: float
    optimizer: float

    @classmethod
    def of_stages(cls, settings: PlannedSettings, replicas: int) -> HeldShares:
        if settings.weights == "host":
            return cls(0.0, 0.0, 0.0)
        divided = SHARDINGS.index(settings.sharding)
        parameters, gradients, optimizer = (
            1.0 / replicas if divided >= least else 1.0 for least in (3, 2, 1)
        )
        return cls(parameters, gradients, optimizer)

    @classmethod
    def around_stages(cls, settings: PlannedSettings, replicas: int) -> HeldShares:
        """Return the shares of modules around the stages; gradients leave after a backward."""
        return cls(1.0, 1.0, 1.0 if settings.sharding is None else 1.0 / replicas)
