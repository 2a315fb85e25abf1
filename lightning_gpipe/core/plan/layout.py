"""What runs where: the partitions, the worker and the device of each, and their skip connections.

The worker of each stage, the process of each worker, and the device of each parameter that several
stages share, are data, not arithmetic repeated wherever it is needed. A layout is decided before
anything is moved, and prints.

Each process owns some of the workers. Where one process owns all of them nothing leaves it; a
process for each worker, or one for the workers of each machine, differ in nothing but the owners.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple, get_args

import torch
from torch import nn

from lightning_gpipe.core.plan.partition import Partition
from lightning_gpipe.core.plan.route import CALLER, Route

Around = Literal["first", "last"]

Placing = Callable[[int, int], tuple[int, ...]]  # of stages on workers, by the numbers of both

META = torch.device("meta")  # where a process has what another one owns: without values


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


def folded(n: int, workers: int) -> tuple[int, ...]:
    """Stages go to the last worker and back: with two, stages 0 to 3 on 0, 1, 1, 0.

    Raises:
        ValueError: If a worker would not have two stages.
    """
    if n != 2 * workers:
        raise ValueError(
            f"schedule='zero_bubble_v' needs two stages on each device: got {n} stages on "
            f"{workers} devices. Write a balance of {2 * workers} numbers."
        )
    return *range(workers), *reversed(range(workers))


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
        homes: The home of each parameter: the device that it is on in this process, which is
            ``meta`` if another process owns it. A stage that has the parameter on another device
            follows it: it makes a new copy for each mini-batch.
        around: Whether what is around the stages is with the last or the first of them.
        owners: The process of each worker, by its rank in the pipeline.
        rank: That of this process.
        everywhere: The parameters that are used around the stages too: each process has them.
    """

    partitions: tuple[Partition, ...]
    devices: tuple[torch.device, ...]
    placement: tuple[int, ...]
    routes: tuple[Route, ...] = ()
    homes: Mapping[nn.Parameter, torch.device] = field(default_factory=dict)
    around: Around = "last"
    owners: tuple[int, ...] = ()
    rank: int = 0
    everywhere: tuple[nn.Parameter, ...] = ()

    def __post_init__(self) -> None:
        if not self.owners:
            object.__setattr__(self, "owners", (self.rank,) * len(self.devices))

    @cached_property
    def outside(self) -> torch.device:
        """The device of what is around the stages in this process, and of what they return."""
        return self.device_of(self.stages_here[-1 if self.around == "last" else 0])

    @cached_property
    def spread(self) -> bool:
        """Whether other processes own workers too."""
        return set(self.owners) != {self.rank}

    @property
    def ranks(self) -> list[int]:
        """Those of all processes, in order."""
        return sorted(set(self.owners))

    @cached_property
    def workers_here(self) -> list[int]:
        """The workers of this process, in order."""
        return [w for w, owner in enumerate(self.owners) if owner == self.rank]

    @cached_property
    def devices_here(self) -> list[torch.device]:
        """The device of each worker of this process."""
        return [self.devices[w] for w in self.workers_here]

    @cached_property
    def stages_here(self) -> list[int]:
        """The stages of this process, in order."""
        return [j for j in range(self.n) if self.owner_of(j) == self.rank]

    @property
    def n(self) -> int:
        """The number of stages."""
        return len(self.placement)

    def device_of(self, j: int) -> torch.device:
        """The device of stage ``j``."""
        return self.devices[self.placement[j]]

    def place(self, n: int, workers: int) -> tuple[int, ...]:
        """The worker of each stage, of another layout with as many stages and workers."""
        return self.placement

    def where(self, j: int) -> str:
        """The device of stage ``j``, with its process if there are several."""
        device = str(self.device_of(j))
        return f"{device} of rank {self.owner_of(j)}" if self.spread else device

    def owner_of(self, j: int) -> int:
        """The process of stage ``j``."""
        return self.owners[self.placement[j]]

    def stages_of(self, worker: int) -> list[int]:
        """The stages of a worker, in order."""
        return self._stages_of[worker]

    @cached_property
    def _stages_of(self) -> list[list[int]]:
        workers = range(len(self.devices))
        return [[j for j, owner in enumerate(self.placement) if owner == w] for w in workers]

    def arriving(self, j: int) -> tuple[Route, ...]:
        """The skip connections that end at stage ``j``."""
        return tuple(route for route in self.routes if route.target == j)

    def leaving(self, j: int) -> tuple[Route, ...]:
        """The skip connections that start at stage ``j``."""
        return tuple(route for route in self.routes if route.source == j)

    def with_homes(self, homes: Mapping[nn.Parameter, torch.device]) -> Layout:
        """The same layout, with other homes for some parameters."""
        return replace(self, homes={**self.homes, **homes})

    def with_everywhere(
        self, parameters: Iterable[nn.Parameter], device: torch.device | None = None
    ) -> Layout:
        """The same layout, in which each process has ``parameters``, for what is around the stages.

        Args:
            parameters: The parameters.
            device: Their device in this process; None for :attr:`outside`.
        """
        shared = dict.fromkeys(parameters, device or self.outside)
        everywhere = tuple({**dict.fromkeys(self.everywhere), **shared})
        return replace(self.with_homes(shared), everywhere=everywhere)

    def __str__(self) -> str:
        """One line per stage::

        stage 0 | worker 0 | cuda:0 | layers 0..2 | sends 'x' to stage 2
        stage 1 | worker 1 | cuda:1 | layers 3..5 | follows 1 parameter of cuda:0

        With several processes, the device is followed by that of the worker: ``cuda:0 of rank 1``.
        """
        return "\n".join(map(self._line, range(self.n)))

    def _line(self, j: int) -> str:
        worker = f"worker {self.placement[j]}"
        parts = [f"stage {j}", worker, self.where(j), f"{self.partitions[j]}"]
        parts += [f"sends {route.name} to stage {route.target}" for route in self.leaving(j)]
        for home, number in Counter(self._followed(j)).items():
            parts.append(f"follows {number} parameter{'s' * (number > 1)} of {home}")
        return " | ".join(parts)

    def _followed(self, j: int) -> Iterator[str]:
        """Yield the home of each parameter that stage ``j`` follows."""
        device, owner = self.device_of(j), self.owner_of(j)
        first = {tie.parameter: tie.home for tie in ties_of(self) if j in tie.followers}
        for parameter in self.partitions[j].parameters:
            if (home := first.get(parameter, CALLER)) != CALLER:
                yield self.where(home)
            elif owner == self.rank and self.homes.get(parameter, device) != device:
                yield str(self.homes[parameter])


class Tie(NamedTuple):
    """A parameter that a process shares with another one, or with what is around the stages.

    Attributes:
        parameter: The parameter.
        home: The stage whose process has its values; the caller's place, -1, if each process has.
        followers: The stages of other processes that have it; all that do, if each process has.
    """

    parameter: nn.Parameter
    home: int
    followers: tuple[int, ...]


def ties_of(layout: Layout) -> list[Tie]:
    """What processes share, in an order that is the same in each of them."""
    if not layout.spread:
        return []
    everywhere = {id(parameter) for parameter in layout.everywhere}
    stages: dict[nn.Parameter, list[int]] = {}
    for j, partition in enumerate(layout.partitions):
        for parameter in partition.parameters:
            stages.setdefault(parameter, []).append(j)
    found = []
    for parameter, users in stages.items():
        if id(parameter) in everywhere:
            found.append(Tie(parameter, CALLER, tuple(users)))
            continue
        home = users[0]
        away = tuple(j for j in users if layout.owner_of(j) != layout.owner_of(home))
        if away:
            found.append(Tie(parameter, home, away))
    return found


def lay_out(
    partitions: Sequence[Partition],
    devices: Sequence[torch.device],
    routes: Sequence[Route] = (),
    around: Around = "last",
    owners: Sequence[int] = (),
    rank: int = 0,
    place: Placing = looped,
) -> Layout:
    """The layout in which ``place`` gives each stage its worker."""
    placement = place(len(partitions), len(devices))
    homes: dict[nn.Parameter, torch.device] = {}
    for partition, worker in zip(partitions, placement, strict=True):
        here = not owners or owners[worker] == rank
        for parameter in partition.parameters:  # the first stage that has it is its home
            homes.setdefault(parameter, devices[worker] if here else META)
    return Layout(
        tuple(partitions),
        tuple(devices),
        placement,
        tuple(routes),
        homes,
        around,
        tuple(owners),
        rank,
    )
