"""The prediction for a stage: its time, and the bytes of its device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf
from typing import Any, NamedTuple

from lightning_gpipe.core.balance import LayerProfile
from lightning_gpipe.core.layout import SHARDINGS
from lightning_gpipe.core.planner.settings import PlannedSettings


class HeldShares(NamedTuple):
    """The shares of a stage that its device has while other stages run.

    Divided weights are whole for the stage at work and the next one, and gradients until those of a
    stage are complete.
    """

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


class Memory(NamedTuple):
    """The bytes of a stage when its device is at the peak of a mini-batch."""

    parameters: float
    gradients: float
    optimizer: float
    buffers: float
    activations: float = 0.0  # saved for backward, without the boundaries
    boundaries: float = 0.0  # inputs from other stages, until their backward
    outputs: float = 0.0  # of the pipeline, on the device with the modules around it

    @classmethod
    def of(cls, layers: Sequence[LayerProfile]) -> Memory:
        kinds = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "buffer_bytes")
        return cls(*(sum(getattr(layer, kind) for layer in layers) for kind in kinds))

    def divided(self, shares: HeldShares) -> Memory:
        parameters, gradients, optimizer = shares
        return self._replace(
            parameters=parameters * self.parameters,
            gradients=gradients * self.gradients,
            optimizer=optimizer * self.optimizer,
        )

    @property
    def held(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.buffers

    @property
    def total(self) -> float:
        return self.held + self.activations + self.boundaries + self.outputs


@dataclass(frozen=True)
class StagePrediction:
    """The predicted time and memory of a stage."""

    first: int  # the index of its first layer
    layers: tuple[str, ...]
    device: int
    parameters: int  # elements, those around the layers included
    time: float  # of a mini-batch, without waits
    memory: Memory  # at the peak of its device
    limit: float  # the bytes of its device; infinite if unknown
    sent: float  # bytes to later stages in a mini-batch; as many come back
    beside: float = 0.0  # bytes of the other stages of its device at that peak

    @property
    def needed(self) -> float:
        return self.memory.total + self.beside

    @property
    def missing(self) -> float:
        return max(0.0, self.needed - self.limit)

    def as_dict(self) -> dict[str, Any]:
        limit = None if self.limit == inf else self.limit
        memory = {**self.memory._asdict(), "total": self.memory.total}
        return {**asdict(self), "layers": list(self.layers), "memory": memory, "limit": limit}
