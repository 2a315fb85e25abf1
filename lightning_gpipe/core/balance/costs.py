"""The costs of layers, and the speed and the memory of the devices of stages.

A cost is a number for each layer that adds up over a stage, in any unit. The number of parameters
is counted, not measured, so every process and every run of a job finds the same balance.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import NamedTuple

from torch import nn

from lightning_gpipe.core.layout import layer_ranges


class Transfer(NamedTuple):
    """The cost for the stage of layer ``user`` of a value that ``maker`` makes on another stage."""

    maker: int
    user: int
    time: float


@dataclass(frozen=True)
class LayerCosts:
    """The costs of each layer, in order; empty where they do not matter."""

    times: Sequence[float]  # on a device of speed 1
    memory: Sequence[float] = ()  # bytes
    transfers: Sequence[Transfer] = ()  # of outputs to the next layer, and of skip connections
    live: Sequence[float] = ()  # further bytes for each micro-batch that is alive
    extra: Sequence[float] = ()  # further time, as for recomputation; the place says how often

    def __post_init__(self) -> None:
        _check_costs("costs", self.times)
        _check_costs("memory", self.memory)
        _check_costs("live", self.live)
        _check_costs("extra", self.extra)
        _check_costs("the time of transfers", [transfer.time for transfer in self.transfers])

    def times_at(self, place: Place) -> list[float]:
        """Return the time of each layer at a place, on a device of speed 1."""
        extra = self.extra or [0.0] * len(self.times)
        return [time + place.extra * more for time, more in zip(self.times, extra, strict=True)]

    def of_stages(self, balance: Sequence[int], places: Sequence[Place]) -> list[float]:
        pairs = zip(places, layer_ranges(balance), strict=True)
        return [sum(self.times_at(place)[own.start : own.stop]) for place, own in pairs]


@dataclass(frozen=True)
class Place:
    """The device of a stage, for a balance or a plan.

    Example::

        devices = [Place(memory=24 * 2**30), Place(memory=16 * 2**30, speed=0.5)]

    Attributes:
        speed: The speed, relative to the device on which the times were measured.
        memory: The bytes of its memory.
        busy: The time of other work than the layers, such as an embedding or a loss, in the unit
            of the times of the layers.
        taken: The bytes in use for other things than the layers.
        alive: The number of micro-batches whose activations it holds at once.
        extra: The factor of the extra time of layers, which recomputation takes: 0.5 if every
            second micro-batch is recomputed.
        micro_batches: The number of micro-batches, if it may recompute as many of them as its
            memory requires; otherwise 0.
        least: The number of micro-batches whose activations it holds at once if all are recomputed.
        host_speed: The bytes per second from the memory of the host, and at the same time as many
            to it. The default is that of PCIe 4.0.
        replica_speed: The bytes per second from other replicas. By default these transfers take no
            time.
    """

    speed: float = 1.0
    memory: float = inf
    busy: float = 0
    taken: float = 0
    alive: float = 0
    extra: float = 0
    micro_batches: int = 0
    least: float = 0
    host_speed: float = 20e9
    replica_speed: float = inf

    def __post_init__(self) -> None:
        if not (isfinite(self.speed) and self.speed > 0):
            raise ValueError(f"the speed of a device must be positive: got {self.speed}.")
        for speed in (self.host_speed, self.replica_speed):
            if not speed > 0:
                raise ValueError(f"the speed of a bus must be positive: got {speed}.")
        if not self.memory >= 0:
            raise ValueError(f"the memory of a device must not be negative: got {self.memory}.")
        numbers = [self.busy, self.taken, self.alive, self.extra, self.least]
        _check_costs("busy, taken, alive, extra, least", numbers)


def parameter_costs(layers: Iterable[nn.Module]) -> list[int]:
    """Count the elements of each layer's parameters; a shared one counts for the first layer."""
    seen: set[nn.Parameter] = set()
    costs = []
    for layer in layers:
        new = [p for p in layer.parameters() if p not in seen]
        costs.append(sum(p.numel() for p in new))
        seen.update(new)
    return costs


def sums_of(costs: Sequence[float], balance: Sequence[int]) -> list[float]:
    """Return the sum of the layers' costs in each stage."""
    return [sum(costs[k] for k in own) for own in layer_ranges(balance)]


def _check_costs(name: str, costs: Sequence[float]) -> None:
    if wrong := [f"{name}[{k}]={c}" for k, c in enumerate(costs) if not (isfinite(c) and c >= 0)]:
        raise ValueError(
            f"{name} must be finite and not negative: got {', '.join(wrong)}. "
            "Measure these layers again, or give them the cost 0."
        )
