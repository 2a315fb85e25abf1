"""What the layers of a model cost, each by itself: a value that prints and can be kept in a file.

Costs of a micro-batch have a fixed part and a part for each row, so those of micro-batches of
another size can be predicted. Forward and backward are apart, and so is a forward that drops its
activations: which of them a stage runs how often is the schedule's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal


@dataclass(frozen=True)
class PerRow:
    """A cost of a micro-batch.

    >>> PerRow(fixed=1.0, per_row=0.5).at(8)
    5.0

    Attributes:
        fixed: What it is without rows.
        per_row: What each row adds.
    """

    fixed: float = 0.0
    per_row: float = 0.0

    def at(self, rows: int) -> float:
        """The cost of a micro-batch with so many rows."""
        return self.fixed + self.per_row * rows

    def over(self, number: float) -> PerRow:
        """The cost divided by a number."""
        return PerRow(self.fixed / number, self.per_row / number)

    @classmethod
    def through(cls, costs: Mapping[int, float]) -> PerRow:
        """The cost of which one or two measurements are known; neither part is negative.

        Args:
            costs: By the number of rows. The one of the most rows is met exactly.
        """
        rows = max(costs)
        cost, slope = costs[rows], costs[rows] / max(rows, 1)
        if len(costs) > 1:
            fewer = min(costs)
            slope = min(max(0.0, (cost - costs[fewer]) / (rows - fewer)), slope)
        return cls(cost - slope * rows, slope)


_TIMES = ("forward", "dropping", "backward", "inputs", "weights")  # of a layer


@dataclass(frozen=True)
class LayerProfile:
    """What one layer costs, by itself.

    The unit of time is that of the :class:`ModelProfile`: seconds, or floating-point operations.

    Attributes:
        name: What tables and errors call it.
        forward: The time of a forward that keeps its activations, as a recomputation does.
        dropping: The time of a forward that drops them.
        backward: The time of a backward, recomputation not included.
        saved: The bytes that are saved for a backward, but for what an earlier layer has saved.
        inputs: The time of that part of a backward for which the layer before waits; None if
            backwards in two parts were not measured.
        weights: The time of the other part, the gradients of the weights.
        left: The bytes that are kept between the two.
        waited: Whether a layer before waits for a gradient: any of its inputs requires one.
        parameters: The number of elements of its parameters; a shared one counts for the first
            layer that has it.
        parameter_bytes: Their bytes.
        gradient_bytes: The bytes of the gradients of those that require one.
        optimizer_bytes: The bytes that the optimizer keeps for these.
        buffer_bytes: The bytes of its buffers.
    """

    name: str
    forward: PerRow = field(default_factory=PerRow)
    dropping: PerRow = field(default_factory=PerRow)
    backward: PerRow = field(default_factory=PerRow)
    saved: PerRow = field(default_factory=PerRow)
    inputs: PerRow | None = None
    weights: PerRow | None = None
    left: PerRow | None = None
    waited: bool = True
    parameters: int = 0
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    buffer_bytes: int = 0

    @property
    def held_bytes(self) -> int:
        """The bytes that it needs whatever runs."""
        held = self.parameter_bytes + self.gradient_bytes
        return held + self.optimizer_bytes + self.buffer_bytes

    def time(self, rows: int, *, recomputed: bool = False, split: bool = False) -> float:
        """The time of a micro-batch, forward and backward, the recomputation included.

        Args:
            rows: Its number of rows.
            recomputed: Whether it is recomputed.
            split: Whether backward is in two parts, if they were measured.
        """
        time = self.forward.at(rows)
        if split and self.inputs and self.weights:
            time += self.inputs.at(rows) + self.weights.at(rows)
        else:
            time += self.backward.at(rows)
        return time + (self.dropping.at(rows) if recomputed else 0.0)


@dataclass(frozen=True)
class Carried:
    """A value that a layer makes and a later one uses: what goes on to the next, or a skip tensor.

    Attributes:
        maker: The index of the layer that makes it.
        user: The index of the layer that uses it.
        size: Its bytes in a micro-batch.
        saved: The bytes of it that the user saves for a backward, and nobody has saved before.
    """

    maker: int
    user: int
    size: PerRow
    saved: PerRow = field(default_factory=PerRow)


@dataclass(frozen=True)
class ModelProfile:
    """What the layers of a model cost.

    Attributes:
        layers: Each layer, in order.
        carried: What layers hand to later ones.
        around: What is around the layers: its parameters, gradients, optimizer state and buffers.
        output: The bytes of what the last layer makes of a micro-batch.
        rows: The number of rows of the micro-batches that were measured.
        chunks: The number of micro-batches that the sample made.
        unit: The unit of time: ``"s"``, or ``"FLOP"`` if nothing was run.
        device: Where they were measured.
    """

    layers: tuple[LayerProfile, ...]
    carried: tuple[Carried, ...]
    around: LayerProfile
    rows: int
    chunks: int
    unit: Literal["s", "FLOP"]
    device: str
    output: PerRow = field(default_factory=PerRow)

    @property
    def split(self) -> bool:
        """Whether backwards in two parts were measured."""
        return all(layer.weights is not None for layer in self.layers)

    def times(self, *, recomputed: float = 0.0, split: bool = False) -> list[float]:
        """The time of each layer for a micro-batch as measured.

        Args:
            recomputed: The share of micro-batches that are recomputed.
            split: Whether backwards are in two parts.
        """
        return [
            layer.time(self.rows, split=split) + recomputed * layer.dropping.at(self.rows)
            for layer in self.layers
        ]

    def in_seconds(self, per_second: float) -> ModelProfile:
        """The same in seconds, on a device that makes so many operations in each."""
        layers = []
        for layer in self.layers:
            costs = {name: getattr(layer, name) for name in _TIMES}
            times = {name: each.over(per_second) for name, each in costs.items() if each}
            layers.append(replace(layer, **times))
        return replace(self, layers=tuple(layers), unit="s")

    def as_dict(self) -> dict[str, Any]:
        """The same as nested dicts and lists of numbers and strings, as for JSON."""
        found = asdict(self)
        return {**found, "layers": list(found["layers"]), "carried": list(found["carried"])}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> ModelProfile:
        """What :meth:`as_dict` gave."""
        carried = [
            Carried(each["maker"], each["user"], PerRow(**each["size"]), PerRow(**each["saved"]))
            for each in found["carried"]
        ]
        return cls(
            **{
                **found,
                "layers": tuple(map(_layer, found["layers"])),
                "carried": tuple(carried),
                "around": _layer(found["around"]),
                "output": PerRow(**found["output"]),
            }
        )


def slowest(costs: Sequence[float], balance: Iterable[int]) -> float:
    """The largest sum of the costs of a stage."""
    found, first = 0.0, 0
    for size in balance:
        found = max(found, sum(costs[first : first + size]))
        first += size
    return found


def _layer(found: Mapping[str, Any]) -> LayerProfile:
    values: dict[str, Any] = {
        k: PerRow(**v) if isinstance(v, Mapping) else v for k, v in found.items()
    }
    return LayerProfile(**values)
