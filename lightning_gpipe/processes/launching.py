"""Which processes run pipelines, how they are started, and how they find one another.

Lightning's parallel strategies take the number of processes, and the rank of each, from the devices
or from the environment. A pipeline in one process has one rank, whatever the number of its devices,
and also where a launcher's variables are set. One in several is started by Lightning's launchers.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal, NamedTuple, NoReturn, get_args

import torch
import torch.distributed as dist
from lightning.fabric.strategies.launchers.multiprocessing import _disable_module_memory_sharing
from lightning.fabric.utilities.rank_zero import rank_zero_only as rank_zero_of_fabric
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.strategies.launchers.multiprocessing import _GlobalStateSnapshot
from lightning.pytorch.utilities import rank_zero_only
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from lightning_gpipe.core.transport import patience_of
from lightning_gpipe.foreign_trainers import accept, refuse_a_twin, refuse_fabric
from lightning_gpipe.processes.agreement import check_same, versions
from lightning_gpipe.processes.arrangement import Arrangement, Mode
from lightning_gpipe.processes.batches import Generators
from lightning_gpipe.processes.children import AFTER_FAILURE, Scripts, end
from lightning_gpipe.processes.circles import Circles, connect
from lightning_gpipe.processes.gathering import fetch
from lightning_gpipe.processes.group import Group
from lightning_gpipe.processes.network import choose_interface
from lightning_gpipe.processes.starting import start_together
from lightning_gpipe.refusals import (
    refuse_a_second_trainer,
    refuse_several_nodes,
    refuse_several_processes,
)

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


def check_processes(
    processes: str, start_method: str, lost_after: timedelta | None, replicas: int
) -> None:
    """Refuse what is no way to run in processes."""
    if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1:
        raise ValueError(f"replicas must be a positive integer: got {replicas!r}.")
    if lost_after is not None and (
        (processes, replicas) == ("single", 1) or lost_after <= timedelta(0)
    ):
        raise ValueError(
            "lost_after must be positive, and is for several processes: got "
            f"lost_after={lost_after!r}, processes={processes!r}. Leave it out, or give processes "
            "and a datetime.timedelta."
        )
    if processes not in get_args(Mode):
        words = ", ".join(map(repr, get_args(Mode)))
        raise ValueError(f"processes must be one of {words}: got {processes!r}.")
    if start_method not in get_args(StartMethod):
        words = ", ".join(map(repr, get_args(StartMethod)))
        raise ValueError(f"start_method must be one of {words}: got {start_method!r}.")


class Terms(NamedTuple):
    """Which processes there are, and how they are started.

    Attributes:
        processes: Which processes a pipeline has.
        replicas: How many pipelines there are.
        timeout: How long they wait for one another.
        lost_after: After how long one that is not heard is lost; None for the engine's default.
        process_group_backend: The backend of the process group; None for what the devices need.
        start_method: How they are started, if no launcher of the user's has.
    """

    processes: Mode
    replicas: int
    timeout: timedelta
    lost_after: timedelta | None
    process_group_backend: str | None
    start_method: StartMethod


class Launched(ParallelStrategy):
    """A strategy of one Trainer, in one process or several.

    Args:
        terms: Which processes there are, and how they are started.
    """

    def __init__(self, terms: Terms) -> None:
        super().__init__()
        accept(Launched)
        self._mode: Mode = terms.processes
        self._replicas = terms.replicas
        self._timeout = terms.timeout
        self._lost_after = terms.lost_after
        self._backend = terms.process_group_backend
        self._start_method: StartMethod = terms.start_method
        self._nodes = 1
        self._circles: Circles | None = None  # of several processes, once they are connected
        self._elsewhere: set[str] = set()  # the paths of modules in stages of other processes

    # A Trainer reads the private attribute of a strategy object, and later sets the other.

    @property
    def _accelerator(self) -> Accelerator | None:
        refuse_a_second_trainer(self._accelerator_of_trainer)
        return None

    @_accelerator.setter
    def _accelerator(self, accelerator: Accelerator | None) -> None:
        self._accelerator_of_trainer = accelerator

    # Fabric reads this.

    @property
    def _precision(self) -> NoReturn:
        refuse_fabric()

    @property
    @override
    def accelerator(self) -> Accelerator | None:
        return self._accelerator_of_trainer

    @accelerator.setter
    @override
    def accelerator(self, accelerator: Accelerator) -> None:
        refuse_a_twin(accelerator)
        self._accelerator_of_trainer = accelerator

    # Which processes there are.

    @property
    def several(self) -> bool:
        """Whether a pipeline may have several processes."""
        return self._mode != "single"

    @property
    def is_distributed(self) -> bool:
        """Whether processes see other batches than this one: those of other replicas do."""
        return self._replicas > 1

    @property
    def replica(self) -> int:
        """The number of this process's pipeline among all."""
        return self._arrangement.replica_of(self.global_rank)

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The processes, in the dimensions ``data_parallel`` and ``pipeline_parallel``.

        None before they are connected, and where there is only one.
        """
        return None if self._circles is None else self._circles.mesh

    @property
    def num_processes(self) -> int:
        """The number of processes on a machine."""
        return self._arrangement.on_each_node

    @property
    @override
    def global_rank(self) -> int:
        return super().global_rank if self._launched else 0

    @property
    @override
    def local_rank(self) -> int:
        return super().local_rank if self._launched else 0

    @property
    @override
    def node_rank(self) -> int:
        return super().node_rank if self._launched else 0

    @property
    @override
    def world_size(self) -> int:
        return self._arrangement.world_size

    @property
    def num_nodes(self) -> int:
        """The number of machines."""
        return self._nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        if not self._launched:
            refuse_several_nodes(num_nodes)
        self._nodes = num_nodes

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self._replicas, "rank": self.replica}

    @property
    def _launched(self) -> bool:
        """Whether there may be several processes."""
        return self.several or self._replicas > 1

    @property
    def _arrangement(self) -> Arrangement:
        return Arrangement(self._mode, self._replicas, self._nodes, len(self._devices))

    @property
    def _devices(self) -> list[torch.device]:
        """Those of the Trainer: of this machine."""
        assert self.parallel_devices, "the Trainer sets the devices"
        return self.parallel_devices

    @property
    def _own_devices(self) -> list[torch.device]:
        """Those of this process."""
        return list(self._arrangement.of_process(self._devices, self.local_rank))

    @property
    def _workers(self) -> list[torch.device]:
        """The device of each worker of this process's pipeline, on all machines."""
        return list(self._arrangement.of_replica(self._devices, self.replica))

    @property
    def pipeline_group(self) -> Group | None:
        """The processes of this pipeline, once they are connected, if it has several."""
        return None if self._circles is None else self._circles.pipeline

    # Starting and connecting them.

    @override
    def _configure_launcher(self) -> None:
        if not self._launched:
            return
        assert self.cluster_environment is not None, "the Trainer has found one"
        if self._start_method == "popen":
            self._launcher = Scripts(
                self.cluster_environment, self.num_processes, self.num_nodes, self._timeout
            )
        else:
            self._launcher = _Started(self, start_method=self._start_method)

    def set_world_ranks(self) -> None:
        """Tell the environment which of the processes this is."""
        if self._launched and self.cluster_environment is not None:
            rank = self.node_rank * self.num_processes + self.local_rank
            self.cluster_environment.set_global_rank(rank)
            self.cluster_environment.set_world_size(self.world_size)
            for each in (rank_zero_only, rank_zero_of_fabric):
                vars(each)["rank"] = self.global_rank

    @override
    def setup_environment(self) -> None:
        if self._launched:
            self._connect()
        else:
            refuse_several_processes(self.cluster_environment)
        super().setup_environment()

    def _connect(self) -> None:
        """Join the others; draw the same random numbers as those of this pipeline from here on."""
        assert self.cluster_environment is not None
        self.set_world_ranks()
        if self.world_size == 1:
            return
        if not dist.is_initialized():
            if self.num_nodes > 1:
                choose_interface(self.cluster_environment.main_address)
            backend = self._backend or backend_for(self.root_device)
            patience = patience_of(self._lost_after)
            start_together(self.cluster_environment, backend, patience, self._timeout)
        if self._circles is None:
            self._circles = connect(
                self._arrangement, self.root_device.type, self._timeout, self._lost_after
            )
        check_same(self._circles.everyone, versions())
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._circles.mesh
        if self.pipeline_group is not None:
            Generators().set(self.pipeline_group.broadcast(Generators().state()))

    def fetch(self, module: nn.Module) -> None:
        """Give the module of the first process the values of all, on the CPU."""
        if self._circles is None:
            return
        self._circles.everyone.meet("gather the model")
        if self.pipeline_group is not None and not self.replica:
            fetch(module, self.pipeline_group, self._elsewhere)


def backend_for(device: torch.device) -> str:
    """The backend of torch.distributed that tensors on ``device`` need, and those of the host."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"


class _Started(_MultiProcessingLauncher):
    """Starts processes with multiprocessing, and leaves the whole model in the main process.

    Lightning takes forkserver for a kind of fork. But a process of such a server gets the model
    pickled, in memory that all processes share, and begins without the random states of the main
    process, as a spawned one does.
    """

    @override
    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,
        trainer: Trainer | None = None,
        **kwargs: Any,
    ) -> Any:
        self._global_states = _GlobalStateSnapshot.capture()  # pickled with the launcher
        try:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        except BaseException:
            end(self.procs, AFTER_FAILURE)  # the main process would wait for them when it ends
            raise

    @override
    def _wrapping_function(
        self, process_idx: int, trainer: Any, function: Any, args: Any, kwargs: Any, *rest: Any
    ) -> None:
        if self._start_method == "forkserver":
            self._global_states.restore()
            args, kwargs = _disable_module_memory_sharing((args, kwargs))
        super()._wrapping_function(process_idx, trainer, function, args, kwargs, *rest)

    @override
    def _collect_rank_zero_results(self, trainer: Any, results: Any) -> Any:
        strategy = self._strategy
        assert isinstance(strategy, Launched)
        strategy.fetch(trainer.lightning_module)
        return super()._collect_rank_zero_results(trainer, results)
