"""Layouts: the partitions, the worker and device of each, and skips, decided before any move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import nn

from lightning_gpipe.core.layout.partition import Partition
from lightning_gpipe.core.programs import Route
from lightning_gpipe.core.schedules import CALLER, counted, looped

Around = Literal["first", "last"]
Weights = Literal["device", "host"]
ShardingName = Literal["optimizer", "gradients", "parameters"]
SHARDINGS: tuple[ShardingName | None, ...] = (None, *get_args(ShardingName))  # each divides more

HOST = torch.device("cpu")
META = torch.device("meta")  # of parameters that another process owns: without values


def check_around(around: str) -> None:
    """Refuse a value other than ``"last"`` and ``"first"``."""
    if around not in get_args(Around):
        raise ValueError(
            "around must be 'last' or 'first', the stage whose device has the modules around the "
            f"pipeline: got {around!r}."
        )


def outside_stage(around: Around, n: int) -> int:
    """Return the one of ``n`` stages whose device has the modules around them."""
    return n - 1 if around == "last" else 0


def check_devices(devices: Any) -> None:
    """Refuse a single device, or a number of them, in the place of a list."""
    if devices is not None and (not isinstance(devices, Sequence) or isinstance(devices, str)):
        raise TypeError(
            f"devices must be a list of devices, or None: got {devices!r}. Give one for each "
            "worker, such as ['cuda:0', 'cuda:1']."
        )


def check_weights(weights: str) -> None:
    """Refuse a value other than ``"device"`` and ``"host"``, for ``"auto"`` is planned before."""
    if weights not in get_args(Weights):
        raise ValueError(
            "weights must be 'device' or 'host', where the weights of the stages are between their "
            f"uses, or 'auto' to plan it: got {weights!r}."
        )


@dataclass(frozen=True)
class Layout:
    """The place of everything in a pipeline.

    Attributes:
        partitions: The layers of each stage, in order.
        devices: The device of each worker.
        placement: The worker of each stage.
        routes: The skip connections that leave their stage.
        homes: The home of each parameter: its device in this process, which is ``meta`` if another
            process owns it. A stage that has the parameter on another device follows it: it makes a
            new copy for each mini-batch.
        around: The stage whose device has the modules around the stages.
        owners: The process of each worker, by its rank in the pipeline.
        everywhere: The parameters that are used around the stages too: each process has them.
        weights: Where the weights of the stages are between their uses, with their gradients.
        starts: The first stage of each module, if several are a chain.
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
    weights: Weights = "device"
    starts: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        if not self.owners:
            object.__setattr__(self, "owners", (self.rank,) * len(self.devices))

    @property
    def layers(self) -> list[nn.Module]:
        return [layer for partition in self.partitions for layer in partition.layers]

    @cached_property
    def outside(self) -> torch.device:
        """The device in this process of the modules around the stages, and of the outputs."""
        return self.device_of(self.stages_here[-1 if self.around == "last" else 0])

    @cached_property
    def spread(self) -> bool:
        return set(self.owners) != {self.rank}

    @cached_property
    def workers_here(self) -> list[int]:
        return [w for w, owner in enumerate(self.owners) if owner == self.rank]

    @cached_property
    def devices_here(self) -> list[torch.device]:
        return [self.devices[w] for w in self.workers_here]

    @cached_property
    def stages_here(self) -> list[int]:
        return self.stages_at(self.rank)

    @property
    def first_here(self) -> bool:
        return self.owner_of(0) == self.rank

    @property
    def last_here(self) -> bool:
        return self.owner_of(self.n - 1) == self.rank

    @property
    def ends(self) -> set[int]:
        return {self.owner_of(0), self.owner_of(self.n - 1)}

    @property
    def n(self) -> int:
        return len(self.placement)

    @property
    def modules(self) -> list[range]:
        """The stages of each module."""
        return [range(*ends) for ends in pairwise([*self.starts, self.n])]

    def device_of(self, j: int) -> torch.device:
        return self.devices[self.placement[j]]

    @cached_property
    def away_from_weights(self) -> frozenset[int]:
        """The workers on devices whose weights are at home on the host."""
        on_host = enumerate(self.devices) if self.weights == "host" else ()
        return frozenset(w for w, device in on_host if device != HOST)

    def where(self, j: int) -> str:
        device = str(self.device_of(j))
        return f"{device} of rank {self.owner_of(j)}" if self.spread else device

    def owner_of(self, j: int) -> int:
        return self.owners[self.placement[j]]

    def stages_at(self, rank: int) -> list[int]:
        return [j for j in range(self.n) if self.owner_of(j) == rank]

    def stages_of(self, worker: int) -> list[int]:
        return self._stages_of[worker]

    @cached_property
    def _stages_of(self) -> list[list[int]]:
        workers = range(len(self.devices))
        return [[j for j, owner in enumerate(self.placement) if owner == w] for w in workers]

    def arriving(self, j: int) -> tuple[Route, ...]:
        return tuple(route for route in self.routes if route.target == j)

    def leaving(self, j: int) -> tuple[Route, ...]:
        return tuple(route for route in self.routes if route.source == j)

    def recut(self, partitions: Sequence[Partition], routes: Sequence[Route]) -> Layout:
        """Return the layout of these partitions in the places of this one's stages.

        The home of a parameter is the first stage that has it.
        """
        homes: dict[nn.Parameter, torch.device] = {}
        for partition, worker in zip(partitions, self.placement, strict=True):
            here = self.owners[worker] == self.rank
            home = HOST if self.weights == "host" else self.devices[worker]
            for parameter in partition.parameters:
                homes.setdefault(parameter, home if here else META)
        return replace(
            self, partitions=tuple(partitions), routes=tuple(routes), homes=homes, everywhere=()
        )

    def with_homes(self, homes: Mapping[nn.Parameter, torch.device]) -> Layout:
        return replace(self, homes={**self.homes, **homes})

    def with_everywhere(
        self, parameters: Iterable[nn.Parameter], device: torch.device | None = None
    ) -> Layout:
        """Return the layout in which each process has these parameters, for use around stages."""
        shared = dict.fromkeys(parameters, device or self.outside)
        everywhere = tuple({**dict.fromkeys(self.everywhere), **shared})
        return replace(self.with_homes(shared), everywhere=everywhere)

    def __str__(self) -> str:
        """One line per stage::

        stage 0 | worker 0 | cuda:0 | layers 0..2 | sends 'x' to stage 2
        stage 1 | worker 1 | cuda:1 | layers 3..5 | follows 1 parameter of cuda:0

        With weights on the host, ``weights on the host`` follows.
        With several processes, the device is followed by that of the worker: ``cuda:0 of rank 1``.
        """
        return "\n".join(map(self._line, range(self.n)))

    def _line(self, j: int) -> str:
        worker = f"worker {self.placement[j]}"
        parts = [f"stage {j}", worker, self.where(j), f"{self.partitions[j]}"]
        parts += [f"sends {route.name} to stage {route.target}" for route in self.leaving(j)]
        if self.placement[j] in self.away_from_weights:
            parts.append("weights on the host")
        for home, number in Counter(self._followed(j)).items():
            parts.append(f"follows {counted(number, 'parameter')} of {home}")
        return " | ".join(parts)

    def _followed(self, j: int) -> Iterator[str]:
        device, owner = self.device_of(j), self.owner_of(j)
        around = {device, HOST} if self.weights == "host" else {device}
        first = {tie.parameter: tie.home for tie in ties_of(self) if j in tie.followers}
        for parameter in self.partitions[j].parameters:
            if (home := first.get(parameter, CALLER)) != CALLER:
                yield self.where(home)
            elif owner == self.rank and self.homes.get(parameter, device) not in around:
                yield str(self.homes[parameter])


class Tie(NamedTuple):
    """A parameter that processes share with one another, or use around the stages too.

    ``home`` is the stage whose process has the values, or the caller's place, -1, if each process
    has; ``followers`` are stages of other processes that have the parameter, or all then.
    """

    parameter: nn.Parameter
    home: int
    followers: tuple[int, ...]


def ties_of(layout: Layout) -> list[Tie]:
    """Return the parameters that processes share, in the same order in each process."""
    if not layout.spread:
        return []
    everywhere = {id(parameter) for parameter in layout.everywhere}
    stages: dict[int, tuple[nn.Parameter, list[int]]] = {}
    for j, partition in enumerate(layout.partitions):
        for parameter in partition.parameters:
            stages.setdefault(id(parameter), (parameter, []))[1].append(j)
    ties = []
    for key, (parameter, users) in stages.items():
        home, followers = CALLER, users
        if key not in everywhere:
            home, *others = users
            followers = [j for j in others if layout.owner_of(j) != layout.owner_of(home)]
        if followers:
            ties.append(Tie(parameter, home, tuple(followers)))
    return ties


def lay_out(
    partitions: Sequence[Partition], devices: Sequence[torch.device], routes: Sequence[Route] = ()
) -> Layout:
    """Return the layout of stages that go round the workers of this process."""
    placement = looped(len(partitions), len(devices))
    return Layout((), tuple(devices), placement).recut(partitions, routes)
