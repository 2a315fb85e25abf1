"""Profiles: the measured costs of the layers of a model, as values that print and can be saved.

Costs of a micro-batch have a fixed part and a part for each row, so those of micro-batches of
another size can be predicted. Forward and backward are separate, and so is a forward that drops its
activations: the schedule decides how often a stage runs which of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from math import ceil
from typing import Any, Literal


@dataclass(frozen=True)
class LinearCost:
    """A cost of a micro-batch.

    >>> LinearCost(fixed=1.0, per_row=0.5).at(8)
    5.0
    """

    fixed: float = 0.0
    per_row: float = 0.0

    def at(self, rows: int) -> float:
        return self.fixed + self.per_row * rows

    def over(self, number: float) -> LinearCost:
        return LinearCost(self.fixed / number, self.per_row / number)

    @classmethod
    def through(cls, costs: Mapping[int, float]) -> LinearCost:
        """Fit one or two measurements, by their rows; the one with the most rows exactly."""
        rows = max(costs)
        cost, slope = costs[rows], costs[rows] / max(rows, 1)
        if len(costs) > 1:
            fewer = min(costs)
            slope = min(max(0.0, (cost - costs[fewer]) / (rows - fewer)), slope)
        return cls(cost - slope * rows, slope)


_TIMES = ("forward", "dropping", "backward", "inputs", "weights")  # of a layer


@dataclass(frozen=True)
class LayerProfile:
    """The costs of one layer.

    The unit of time is that of the :class:`ModelProfile`: seconds, or floating-point operations.

    Attributes:
        name: The name of the layer in tables and errors.
        forward: The time of a forward that keeps its activations, as a recomputation does.
        dropping: The time of a forward that drops them.
        backward: The time of a backward, without recomputation.
        saved: The bytes saved for a backward, without those that an earlier layer has saved.
        inputs: The time of the part of a backward for which the layer before waits; None if
            backwards in two parts were not measured.
        weights: The time of the other part, the gradients of the weights.
        left: The bytes that are kept between the two parts.
        waited: Whether a layer before waits for a gradient: any of the inputs requires one.
        parameters: The number of elements of the parameters; a shared one counts for the first
            layer that has it.
        parameter_bytes: The bytes of the parameters.
        gradient_bytes: The bytes of their gradients.
        optimizer_bytes: The bytes that the optimizer keeps for them.
        buffer_bytes: The bytes of the buffers.
    """

    name: str
    forward: LinearCost = field(default_factory=LinearCost)
    dropping: LinearCost = field(default_factory=LinearCost)
    backward: LinearCost = field(default_factory=LinearCost)
    saved: LinearCost = field(default_factory=LinearCost)
    inputs: LinearCost | None = None
    weights: LinearCost | None = None
    left: LinearCost | None = None
    waited: bool = True
    parameters: int = 0
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    buffer_bytes: int = 0

    @property
    def held_bytes(self) -> int:
        held = self.parameter_bytes + self.gradient_bytes
        return held + self.optimizer_bytes + self.buffer_bytes

    def time(self, rows: int, *, split: bool = False) -> float:
        """Return the time of a micro-batch of ``rows`` rows, forward and backward.

        The parts of a split backward count if they were measured.
        """
        parts = (self.inputs, self.weights) if split else ()
        backward = [cost for cost in parts if cost] or [self.backward]
        return self.forward.at(rows) + sum(cost.at(rows) for cost in backward)


@dataclass(frozen=True)
class CarriedValue:
    """A value that layer ``maker`` makes and a later ``user`` uses: an output or a skip tensor."""

    maker: int
    user: int
    size: LinearCost  # the bytes in a micro-batch
    saved: LinearCost = field(default_factory=LinearCost)  # by the user only


@dataclass(frozen=True)
class ModelProfile:
    """The costs of the layers of a model.

    Attributes:
        layers: The costs of each layer, in order.
        carried: The values that layers hand to later ones.
        around: The modules around the layers: parameters, gradients, optimizer state and buffers.
        rows: The number of rows of the micro-batches that were measured.
        chunks: The number of micro-batches of the sample.
        unit: The unit of time: ``"s"``, or ``"FLOP"`` if nothing was run.
        device: The device on which the layers were measured.
        output: The bytes of the last layer's output for a micro-batch.
    """

    layers: tuple[LayerProfile, ...]
    carried: tuple[CarriedValue, ...]
    around: LayerProfile
    rows: int
    chunks: int
    unit: Literal["s", "FLOP"]
    device: str
    output: LinearCost = field(default_factory=LinearCost)

    @property
    def split(self) -> bool:
        """True if backwards in two parts were measured."""
        return all(layer.weights is not None for layer in self.layers)

    def times(self, *, split: bool = False) -> list[float]:
        return [layer.time(self.rows, split=split) for layer in self.layers]

    def in_seconds(self, per_second: float) -> ModelProfile:
        """Return the profile in seconds, for a device with this many operations per second."""
        layers = []
        for layer in self.layers:
            costs = {name: getattr(layer, name) for name in _TIMES}
            times = {name: cost.over(per_second) for name, cost in costs.items() if cost}
            layers.append(replace(layer, **times))
        return replace(self, layers=tuple(layers), unit="s")

    def with_states(self, share: float) -> ModelProfile:
        """Return the profile for devices that have a share of the optimizer's states."""

        def divided(layer: LayerProfile) -> LayerProfile:
            return replace(layer, optimizer_bytes=ceil(share * layer.optimizer_bytes))

        return replace(self, layers=tuple(map(divided, self.layers)), around=divided(self.around))

    def as_dict(self) -> dict[str, Any]:
        """Return nested dicts and lists of numbers and strings, for JSON."""
        values = asdict(self)
        return {**values, "layers": list(values["layers"]), "carried": list(values["carried"])}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelProfile:
        layers = [LayerProfile(**_with_costs(layer)) for layer in values["layers"]]
        carried = [CarriedValue(**_with_costs(value)) for value in values["carried"]]
        around = LayerProfile(**_with_costs(values["around"]))
        output = LinearCost(**values["output"])
        parts = {"layers": tuple(layers), "carried": tuple(carried), "around": around}
        return cls(**{**values, **parts, "output": output})


def _with_costs(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: LinearCost(**v) if isinstance(v, Mapping) else v for k, v in values.items()}
