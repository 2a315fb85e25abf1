"""The strategy's side of a Trainer that has one process with several devices.

Lightning's parallel strategies take the number of processes, and the rank of each, from the devices
or from the environment. A pipeline in one process sees every batch and has nothing to gather,
whatever the number of its devices, and also where a launcher's variables are set.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor
from typing_extensions import override

from lightning_gpipe.refusals import refuse_a_second_trainer, refuse_several_nodes


class OneProcess(ParallelStrategy):
    """A strategy of one Trainer, in one process."""

    # A Trainer reads the private attribute of a strategy object, and later sets the other.

    @property
    def _accelerator(self) -> Accelerator | None:
        refuse_a_second_trainer(self._accelerator_of_trainer)
        return None

    @_accelerator.setter
    def _accelerator(self, accelerator: Accelerator | None) -> None:
        self._accelerator_of_trainer = accelerator

    @property
    @override
    def accelerator(self) -> Accelerator | None:
        return self._accelerator_of_trainer

    @accelerator.setter
    @override
    def accelerator(self, accelerator: Accelerator) -> None:
        self._accelerator_of_trainer = accelerator

    @property
    def is_distributed(self) -> bool:
        """False: one process sees every batch."""
        return False

    @property
    @override
    def global_rank(self) -> int:
        return 0

    @property
    @override
    def local_rank(self) -> int:
        return 0

    @property
    @override
    def node_rank(self) -> int:
        return 0

    @property
    @override
    def world_size(self) -> int:
        return 1

    @property
    def num_nodes(self) -> int:
        """The number of machines: 1."""
        return 1

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        refuse_several_nodes(num_nodes)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": 1, "rank": 0}

    @override
    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return tensor

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        return tensor

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return decision

    @override
    def barrier(self, name: str | None = None) -> None:
        pass

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj
