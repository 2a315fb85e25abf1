"""Trainers in the ranks of a process group, as if a launcher had started them."""

from pathlib import Path
from typing import Any

import lightning as L
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment

from lightning_gpipe import GPipeStrategy
from tests.support.lightning_modules import trainer

MODES = {"per_stage": (2, 1), "per_node": (4, 2)}  # the number of devices in all, and of machines


class RankEnvironment(ClusterEnvironment):
    """A cluster of the ranks of this test: some on each machine.

    Args:
        on_each: How many are on each machine.
    """

    def __init__(self, on_each: int) -> None:
        self._on_each = on_each

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        return 0  # not used: the process group is there

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return dist.get_world_size()

    def set_world_size(self, size: int) -> None:
        assert size == self.world_size()

    def global_rank(self) -> int:
        return dist.get_rank()

    def set_global_rank(self, rank: int) -> None:
        assert rank == self.global_rank()

    def local_rank(self) -> int:
        return self.global_rank() % self._on_each

    def node_rank(self) -> int:
        return self.global_rank() // self._on_each


def trainer_over(
    root: Path,
    processes: Any,
    balance: Any,
    strategy: dict[str, Any],
    machines: tuple[int, int] | None = None,
    **options: Any,
) -> L.Trainer:
    """A Trainer of a pipeline: one of all its processes, or the only one.

    Args:
        root: Where it writes to.
        processes: Which processes a pipeline has.
        balance: The balance.
        strategy: Other arguments of the strategy.
        machines: The number of devices in all, and of machines, if not those of one pipeline.
        options: Of the Trainer.
    """
    devices, nodes = machines or MODES.get(processes, (len(balance), 1))
    made = GPipeStrategy(balance, **{"chunks": 3, "processes": processes, **strategy})
    if processes != "single" or "replicas" in strategy:
        environment = RankEnvironment(dist.get_world_size() // nodes)
        options = {**options, "plugins": [*options.get("plugins", []), environment]}
    return trainer(root, made, devices=devices // nodes, num_nodes=nodes, **options)
