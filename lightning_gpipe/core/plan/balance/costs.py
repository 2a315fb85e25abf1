"""What layers cost, and what the devices offer on which their stages run.

A cost is a number for each layer that adds up over a stage; its unit does not matter to the solver.
The number of parameters is known before anything has run, and is counted, not measured, so every
process and every run of a job finds the same balance.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import NamedTuple

from torch import nn


class Transfer(NamedTuple):
    """A value that one layer makes and a later one uses.

    If the two are on different stages it costs both of them time: one to send, one to receive.
    Memory it costs only the one that receives it.

    Attributes:
        maker: The index of the layer that makes it.
        user: The index of the layer that uses it.
        time: What it costs each of the two stages.
        sent: Whether it costs the stage of the maker, too.
    """

    maker: int
    user: int
    time: float
    sent: bool = True


@dataclass(frozen=True)
class LayerCosts:
    """What each layer costs, in order.

    Attributes:
        times: The time of each layer, on a device of speed 1.
        memory: The bytes of each layer; empty if memory does not matter.
        live: The bytes that each layer needs besides for a micro-batch that is alive; empty if
            there are none.
        transfers: What layers hand to later ones, such as the output of each to the next, and skip
            connections.
    """

    times: Sequence[float]
    memory: Sequence[float] = ()
    transfers: Sequence[Transfer] = ()
    live: Sequence[float] = ()

    def __post_init__(self) -> None:
        _check_costs("costs", self.times)
        _check_costs("memory", self.memory)
        _check_costs("live", self.live)
        _check_costs("the time of transfers", [each.time for each in self.transfers])
        if self.memory and len(self.memory) != len(self.times):
            raise ValueError(
                f"memory must have a number for each layer: got {len(self.memory)} for "
                f"{len(self.times)} layers."
            )
        for each in self.transfers:
            if not 0 <= each.maker < each.user < len(self.times):
                raise ValueError(
                    f"a transfer must go from a layer to a later one of the {len(self.times)} "
                    f"layers: got {each}."
                )


@dataclass(frozen=True)
class Place:
    """What a stage runs on.

    Attributes:
        speed: How many times as fast it is as the device on which the times were measured.
        memory: The bytes that it has.
        busy: The time that it needs beside that of its layers, as for an embedding or a loss.
        taken: The bytes that it needs beside those of its layers.
        alive: How many micro-batches are alive on it at once.
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

    A parameter that several layers share is counted once, in the first of them: that stage owns it,
    and counting it again would make the costs add up to more than the model.
    """
    seen: set[nn.Parameter] = set()
    costs = []
    for layer in layers:
        new = [p for p in layer.parameters() if p not in seen]
        costs.append(sum(p.numel() for p in new))
        seen.update(new)
    return costs


def _check_costs(name: str, costs: Sequence[float]) -> None:
    if wrong := [f"{name}[{k}]={c}" for k, c in enumerate(costs) if not (isfinite(c) and c >= 0)]:
        raise ValueError(
            f"{name} must be finite and not negative: got {', '.join(wrong)}. "
            "Measure these layers again, or give them the cost 0."
        )
