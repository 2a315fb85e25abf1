"""The costs of layers, and the speed and the memory of the devices of stages.

A cost is a number for each layer that adds up over a stage; its unit does not matter to the solver.
The number of parameters is counted, not measured, so every process and every run of a job finds the
same balance.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import NamedTuple

from torch import nn

from lightning_gpipe.core.layout import layer_ranges


class Transfer(NamedTuple):
    """The cost of a value that one layer makes and a later one uses, if their stages differ.

    It takes time on both stages, to send and to receive, but memory only on the one that receives.

    Attributes:
        maker: The index of the layer that makes it.
        user: The index of the layer that uses it.
        time: The cost for each of the two stages.
        sent: Whether it costs the stage of the maker, too.
    """

    maker: int
    user: int
    time: float
    sent: bool = True


@dataclass(frozen=True)
class LayerCosts:
    """The costs of each layer, in order.

    Attributes:
        times: The time of each layer, on a device of speed 1.
        memory: The bytes of each layer; empty if memory does not matter.
        transfers: The costs of values between layers: outputs to the next, and skip connections.
        live: The further bytes of each layer for a micro-batch that is alive; empty if there are
            none.
    """

    times: Sequence[float]
    memory: Sequence[float] = ()
    transfers: Sequence[Transfer] = ()
    live: Sequence[float] = ()

    def __post_init__(self) -> None:
        _check_costs("costs", self.times)
        _check_costs("memory", self.memory)
        _check_costs("live", self.live)
        _check_costs("the time of transfers", [transfer.time for transfer in self.transfers])


@dataclass(frozen=True)
class Place:
    """The device of a stage.

    Attributes:
        speed: The speed, relative to the device on which the times were measured.
        memory: The bytes of its memory.
        busy: The time for other work than the layers, such as an embedding or a loss.
        taken: The bytes for other things than the layers.
        alive: The number of micro-batches that are alive on it at once.
    """

    speed: float = 1.0
    memory: float = inf
    busy: float = 0
    taken: float = 0
    alive: float = 0

    def __post_init__(self) -> None:
        if not (isfinite(self.speed) and self.speed > 0):
            raise ValueError(f"the speed of a device must be positive: got {self.speed}.")
        if not self.memory >= 0:
            raise ValueError(f"the memory of a device must not be negative: got {self.memory}.")
        _check_costs("busy, taken, alive", [self.busy, self.taken, self.alive])


def parameter_costs(layers: Iterable[nn.Module]) -> list[int]:
    """Count the elements of each layer's parameters.

    A parameter that several layers share is counted in the first of them, whose stage owns it.
    """
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
