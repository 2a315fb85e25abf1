"""What runs where: the partitions, the worker and the device of each, and their skip connections.

The worker of each stage, and the device of each parameter that several stages share, are data, not
arithmetic repeated wherever it is needed. A layout is decided before anything is moved, and prints.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch
from torch import nn

from lightning_gpipe.core.plan.partition import Partition
from lightning_gpipe.core.plan.route import Route

Around = Literal["first", "last"]


def check_around(around: str) -> None:
    """Refuse a stage that what is around a pipeline cannot be with."""
    if around not in get_args(Around):
        raise ValueError(
            "around must be 'last' or 'first', the stage that what is around a pipeline is with: "
            f"got {around!r}."
        )


def one_each(n: int) -> tuple[int, ...]:
    """A worker for each of ``n`` stages."""
    return tuple(range(n))


def looped(n: int, workers: int) -> tuple[int, ...]:
    """Stage j runs on worker j mod ``workers``: with two, stages 0 to 3 on 0, 1, 0, 1."""
    return tuple(j % workers for j in range(n))


def check_even(stages: int, devices: int, way_out: str) -> None:
    """Refuse a number of devices that does not divide the stages.

    Args:
        stages: The number of stages.
        devices: The number of devices.
        way_out: What to do, for the message.
    """
    if not devices or stages % devices:
        raise ValueError(
            "the number of stages must be a multiple of the number of devices, so that each device "
            f"has equally many: got {stages} stages for {devices} devices. {way_out}"
        )


@dataclass(frozen=True)
class Layout:
    """What runs where.

    Attributes:
        partitions: What each stage runs, in order.
        devices: The device of each worker.
        placement: The worker of each stage.
        routes: The skip connections that leave their stage.
        homes: The home of each parameter: the device that it is on. A stage that has the parameter
            on another device follows it: it makes a new copy for each mini-batch.
        around: Whether what is around the stages is with the last or the first of them.
    """

    partitions: tuple[Partition, ...]
    devices: tuple[torch.device, ...]
    placement: tuple[int, ...]
    routes: tuple[Route, ...] = ()
    homes: Mapping[nn.Parameter, torch.device] = field(default_factory=dict)
    around: Around = "last"

    @property
    def outside(self) -> torch.device:
        """The device of what is around the stages, and of what they return to it."""
        return self.device_of(self.n - 1 if self.around == "last" else 0)

    @property
    def n(self) -> int:
        """The number of stages."""
        return len(self.placement)

    def device_of(self, j: int) -> torch.device:
        """The device of stage ``j``."""
        return self.devices[self.placement[j]]

    def stages_of(self, worker: int) -> list[int]:
        """The stages of a worker, in order."""
        return [j for j, owner in enumerate(self.placement) if owner == worker]

    def arriving(self, j: int) -> tuple[Route, ...]:
        """The skip connections that end at stage ``j``."""
        return tuple(route for route in self.routes if route.target == j)

    def leaving(self, j: int) -> tuple[Route, ...]:
        """The skip connections that start at stage ``j``."""
        return tuple(route for route in self.routes if route.source == j)

    def with_homes(self, homes: Mapping[nn.Parameter, torch.device]) -> Layout:
        """The same layout, with other homes for some parameters."""
        return replace(self, homes={**self.homes, **homes})

    def __str__(self) -> str:
        """One line per stage::

        stage 0 | worker 0 | cuda:0 | layers 0..2 | sends 'x' to stage 2
        stage 1 | worker 1 | cuda:1 | layers 3..5 | follows 1 parameter of cuda:0
        """
        return "\n".join(map(self._line, range(self.n)))

    def _line(self, j: int) -> str:
        device = self.device_of(j)
        parts = [f"stage {j}", f"worker {self.placement[j]}", f"{device}", f"{self.partitions[j]}"]
        parts += [f"sends {route.name} to stage {route.target}" for route in self.leaving(j)]
        found = (self.homes.get(p, device) for p in self.partitions[j].parameters)
        away = Counter(home for home in found if home != device)
        for home, number in away.items():
            parts.append(f"follows {number} parameter{'s' * (number > 1)} of {home}")
        return " | ".join(parts)


def lay_out(
    partitions: Sequence[Partition],
    devices: Sequence[torch.device],
    routes: Sequence[Route] = (),
    around: Around = "last",
) -> Layout:
    """The layout in which stage j runs on worker j mod the number of devices."""
    placement = looped(len(partitions), len(devices))
    homes: dict[nn.Parameter, torch.device] = {}
    for partition, worker in zip(partitions, placement, strict=True):
        for parameter in partition.parameters:
            homes.setdefault(parameter, devices[worker])  # the first stage that has it is its home
    return Layout(tuple(partitions), tuple(devices), placement, tuple(routes), homes, around)
