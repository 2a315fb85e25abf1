"""The prediction for a stage: its time, and the bytes of its device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf
from typing import Any, NamedTuple

from lightning_gpipe.core.balance import LayerProfile
from lightning_gpipe.core.planner.held_shares import HeldShares


class Memory(NamedTuple):
    """The bytes of a stage when its device is at the peak of a mini-batch.

    Attributes:
        parameters, gradients, optimizer, buffers: The static bytes, whatever runs.
        activations: The tensors saved for backward, without the boundaries.
        boundaries: The inputs from other stages, kept until their backward.
        outputs: The outputs of the pipeline, on the device with the modules around it: of all
            micro-batches or, where each has a loss of its own, of one.
    """

    parameters: float
    gradients: float
    optimizer: float
    buffers: float
    activations: float = 0.0
    boundaries: float = 0.0
    outputs: float = 0.0

    @classmethod
    def of(cls, layers: Sequence[LayerProfile]) -> Memory:
        kinds = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "buffer_bytes")
        return cls(*(sum(getattr(layer, kind) for layer in layers) for kind in kinds))

    def divided(self, shares: HeldShares) -> Memory:
        """Return the bytes if a device has shares of them."""
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
    """The predicted time and memory of a stage.

    Attributes:
        first: The index of its first layer.
        parameters: The number of elements of its parameters, those around the layers included.
        time: The time of a mini-batch on it, without waits.
        memory: The bytes at the peak of its device.
        limit: The bytes of its device; infinite if they are not known.
        sent: The bytes that it sends to later stages in a mini-batch; as many come back.
        beside: The bytes of the other stages of its device at that peak.
    """

    first: int
    layers: tuple[str, ...]
    device: int
    parameters: int
    time: float
    memory: Memory
    limit: float
    sent: float
    beside: float = 0.0

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
