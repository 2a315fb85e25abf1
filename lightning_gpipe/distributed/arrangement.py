"""The replica, the place in it, and the devices of each process of a Trainer.

Ranks go through the processes of the first pipeline, then through those of the second. A pipeline
has neighbouring devices, so it is within one machine where it fits. For two machines with two
devices each, and two replicas::

    per_stage | rank 0   rank 1 | rank 2   rank 3        per_node | refused: one pipeline over
              | stage 0  stage 1| stage 0  stage 1                | each machine is "single"
              | replica 0       | replica 1
    single    | rank 0          | rank 1
              | stages 0 and 1  | stages 0 and 1

With tensor parallelism a stage has several neighbouring ranks, each of which is in a pipeline of
its own, with a shard of the layers. So one replica on four devices is two pipelines of two ranks::

    per_stage, | rank 0   rank 2 | stages 0 and 1, shard 0
    two shards | rank 1   rank 3 | stages 0 and 1, shard 1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor

Mode = Literal["single", "per_stage", "per_node"]
T = TypeVar("T")


@dataclass(frozen=True)
class Arrangement:
    """The places of the processes of a Trainer; raises a ValueError if they do not divide."""

    mode: Mode
    replicas: int  # each a pipeline, or several that divide their stages
    nodes: int  # the machines
    devices: int  # of each machine
    last_first: bool = False  # whether the first process of a pipeline has its last stage
    tensor_parallel: int = 1  # the processes of a stage, each in a pipeline of its own

    def __post_init__(self) -> None:
        got = f"replicas={self.replicas}, Trainer(devices={self.devices}, num_nodes={self.nodes})"
        if self.tensor_parallel > 1:
            got = f"tensor_parallel={self.tensor_parallel}, {got}"
        if self.mode == "per_stage" and self.nodes * self.devices % self.pipelines:
            raise ValueError(
                "the devices of all machines must divide into equal pipelines: got "
                f"processes='per_stage', {got}, {self.nodes * self.devices} devices."
            )
        if self.mode == "per_node" and self.nodes % self.replicas:
            raise ValueError(
                "processes='per_node' runs a pipeline over one machine or more, so replicas must "
                f"divide their number: got {got}. For several pipelines within a machine write "
                "processes='single'."
            )
        if self.mode == "single" and self.replicas % self.nodes:
            raise ValueError(
                "processes='single' runs each pipeline within one machine, so replicas must be a "
                f"multiple of num_nodes: got {got}. Write num_nodes=1, a multiple of it as "
                "replicas, or processes='per_stage' for pipelines over machines."
            )
        if self.mode == "single" and self.devices % (self.replicas // self.nodes):
            raise ValueError(
                "the devices of a machine must divide into equal pipelines: got "
                f"{got}. Write a multiple of {self.replicas // self.nodes} as devices."
            )

    @property
    def on_each_node(self) -> int:
        counts = {"single": self.replicas // self.nodes, "per_stage": self.devices, "per_node": 1}
        return counts[self.mode]

    @property
    def world_size(self) -> int:
        return self.nodes * self.on_each_node

    @property
    def pipelines(self) -> int:
        return self.replicas * self.tensor_parallel

    @property
    def in_each_pipeline(self) -> int:
        return self.world_size // self.pipelines

    @property
    def ranks(self) -> Tensor:
        """The ranks by their replica, their place in a pipeline, and their shard."""
        shape = self.replicas, self.in_each_pipeline, self.tensor_parallel
        return torch.arange(self.world_size).view(shape)

    @property
    def owners(self) -> list[int] | None:
        """The place in its pipeline of the process of each worker; None for a single process."""
        if self.in_each_pipeline == 1:
            return None
        workers = self.devices // self.on_each_node  # of each process
        return [place for place in self._places for _ in range(workers)]

    @property
    def _places(self) -> list[int]:
        places = list(range(self.in_each_pipeline))
        return places[::-1] if self.last_first else places

    def replica_of(self, rank: int) -> int:
        return rank * self.replicas // self.world_size

    def of_process(self, devices: Sequence[T], local_rank: int) -> Sequence[T]:
        return _part(devices, local_rank, self.on_each_node)

    def of_pipeline(self, devices: Sequence[T], rank: int) -> Sequence[T]:
        """Return the devices of a process's pipeline, one for each worker."""
        of_replica = _part([*devices] * self.nodes, self.replica_of(rank), self.replicas)
        shards = self.tensor_parallel
        own = of_replica[rank % shards :: shards]
        parts = (_part(own, place, self.in_each_pipeline) for place in self._places)
        return [device for part in parts for device in part]


def _part(values: Sequence[T], k: int, parts: int) -> Sequence[T]:
    size = len(values) // parts
    return values[k * size : (k + 1) * size]
