"""The processes of a Trainer: which there are, how they start, and how they find one another.

A pipeline in one process has one rank, even with several devices or a launcher's variables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from socket import socket
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only as rank_zero_of_fabric
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.memory import is_oom_error
from torch.distributed import ProcessGroup

from lightning_gpipe.core.faithful import RandomState, add_note
from lightning_gpipe.core.run import Engine
from lightning_gpipe.core.transport import (
    RankFailed,
    choose_interface,
    is_broken_connection,
    listen,
    make_token,
    resolve,
    start_timeout,
)
from lightning_gpipe.distributed import (
    Arrangement,
    Group,
    ProcessGroups,
    ProcessLauncher,
    Scripts,
    check_same,
    connect,
    start_together,
    versions,
)
from lightning_gpipe.strategy.options import StrategyOptions
from lightning_gpipe.strategy.refusals import refuse_several_nodes, refuse_several_processes

_ALL = 8  # the most processes of a pipeline of which each gets the outputs by default
_MOMENT = 1.0  # seconds
_BROKEN = 5.0  # the same until it is known why a connection has ended


class Processes:
    """The processes of a Trainer, one of which is this one."""

    def __init__(self, options: StrategyOptions) -> None:
        self.options = options
        self.devices: list[torch.device] = []  # of this machine
        self._nodes = 1
        self._environment: ClusterEnvironment | None = None
        self._ranks: ClusterEnvironment | None = None  # if it numbers the processes
        self.groups: ProcessGroups | None = None  # while several processes are connected
        self._listener: socket | None = None  # for the first process, from before it starts

    # Their number, and the place of this one.

    @property
    def split(self) -> bool:
        return self.options.processes != "single"

    @property
    def launched(self) -> bool:
        return self.split or self.replicated

    @property
    def replicated(self) -> bool:
        return self.options.replicas > 1

    @property
    def at_last(self) -> bool:
        """True if only the process of the last stage, which is the first one, gets the outputs."""
        if self.options.outputs != "auto":
            return self.options.outputs == "last"
        return self.options.tensor_parallel == 1 and self._arrangement().in_each_pipeline > _ALL

    @property
    def folded(self) -> bool:
        workers = self._nodes * len(self.devices) // self._arrangement().pipelines
        return self.options.folded(workers)

    @property
    def arrangement(self) -> Arrangement:
        # Stages that go down the devices and back have the last one with the first anyway.
        return self._arrangement(last_first=self.at_last and not self.folded)

    def _arrangement(self, *, last_first: bool = False) -> Arrangement:
        options, devices = self.options, len(self.devices)
        return Arrangement(
            options.processes,
            options.replicas,
            self._nodes,
            devices,
            last_first,
            options.tensor_parallel,
        )

    def place(
        self, devices: list[torch.device], nodes: int, environment: ClusterEnvironment | None
    ) -> None:
        if not self.launched:
            refuse_several_nodes(nodes)
        self.devices, self._nodes, self._environment = devices, nodes, environment
        self._ranks = environment if self.launched else None
        self._set_ranks()

    @property
    def global_rank(self) -> int:
        return 0 if self._ranks is None else self._ranks.global_rank()

    @property
    def local_rank(self) -> int:
        return 0 if self._ranks is None else self._ranks.local_rank()

    @property
    def node_rank(self) -> int:
        return 0 if self._ranks is None else self._ranks.node_rank()

    @property
    def replica(self) -> int:
        return self.arrangement.replica_of(self.global_rank)

    @property
    def place_in_pipeline(self) -> int:
        return 0 if self.pipeline_group is None else self.pipeline_group.rank

    @property
    def own_devices(self) -> list[torch.device]:
        return list(self.arrangement.of_process(self.devices, self.local_rank))

    @property
    def workers(self) -> list[torch.device]:
        """The device of each worker of this process's pipeline, on all machines."""
        return list(self.arrangement.of_pipeline(self.devices, self.global_rank))

    # Starting and connecting them.

    def launcher(
        self,
        strategy: ParallelStrategy,
        on_error: Callable[[BaseException], None],
        fetch: Callable[[LightningModule], None],
    ) -> Scripts | ProcessLauncher | None:
        if not self.launched:
            return None
        assert self._environment is not None, "the Trainer has found one"
        method = self.options.start_method
        if method != "popen":
            return ProcessLauncher(strategy, method, self.listening, fetch, self._part)
        processes, timeout = self.arrangement.on_each_node, self.options.timeout
        node = self._environment, processes, self._nodes
        return Scripts(*node, timeout, on_error, self.listening)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """A ``with`` block in which processes are started: the first one's port is theirs."""
        environment = self._environment
        assert environment is not None, "the Trainer has found one"
        if environment.creates_processes_externally:
            yield
            return
        if self._nodes == 1:
            make_token()
        if self.node_rank == 0:
            patience = start_timeout(self.options.lost_after) / 10
            self._listener = listen(environment.main_address, environment.main_port, patience)
        try:
            yield
        finally:
            if self._listener is not None:
                self._listener.close()
                self._listener = None

    def _set_ranks(self) -> None:
        if self._ranks is None:
            return
        on_each_node = self.arrangement.on_each_node
        self._ranks.set_global_rank(self.node_rank * on_each_node + self.local_rank)
        self._ranks.set_world_size(self.arrangement.world_size)
        for function in (rank_zero_only, rank_zero_of_fabric):
            vars(function)["rank"] = self.global_rank

    def connect(self, device: torch.device, *, synchronised: bool) -> None:
        """Join the other processes, and draw the same random numbers as those of this pipeline.

        With ``synchronised``, batch norms normalise by the rows of all replicas. Raises a
        RuntimeError if some processes do not start, or use other versions or options.
        """
        if not self.launched:
            refuse_several_processes(self._environment)
            return
        assert self._environment is not None
        self._set_ranks()
        if self.arrangement.world_size == 1:
            return
        options = self.options
        if not dist.is_initialized():
            patience = start_timeout(options.lost_after)
            main_address = self._environment.main_address
            resolve(main_address, patience / 10)
            # On one machine, any interface leads to the others.
            with nullcontext() if self._nodes > 1 else suppress(RuntimeError):
                choose_interface(main_address)
            backend = options.process_group_backend or backend_for(device)
            start_together(self._environment, backend, patience, options.timeout, self._listener)
        if self.groups is None:
            facts = versions() | options.same_everywhere() | {"sync_batchnorm": synchronised}
            self.groups = connect(
                self.arrangement,
                device.type,
                options.timeout,
                options.lost_after,
                facts,
                synchronised=synchronised,
                divided=options.divides_parameters,
            )
        replica = self.groups.replica
        if replica is not None:
            state = RandomState.capture()
            state._replace(states=replica.broadcast(state.states)).restore()

    def check_same(self, facts: Mapping[str, Any]) -> None:
        """Raise a RuntimeError in all processes that names the values that differ."""
        if self.groups is not None:
            check_same(self.groups.everyone, facts)

    def of_pipeline(self) -> dict[str, Any]:
        """The arguments of :class:`~lightning_gpipe.GPipe` for a pipeline of several processes."""
        owners = self.arrangement.owners
        return {
            "owners": owners,
            "group": None if self.groups is None else self.groups.along,
            "lost_after": None if owners is None else self.options.lost_after,
        }

    def watch(self, engine: Engine) -> None:
        if self.groups is not None:
            self.groups.watch(engine)
            if self.options.tensor_parallel > 1:
                engine.explain(self._cause_of)

    def _cause_of(self, error: BaseException) -> BaseException:
        if self.groups is None or not is_broken_connection(error):
            return error
        return self.groups.lifeline.failure(_BROKEN) or error

    def tell(self, error: BaseException) -> None:
        """Tell the other processes of an error; note in it if one of them had failed before.

        Raises RankFailed or OutOfStep in place of an error of the network that it causes.
        """
        if self.groups is None:
            return
        broken = is_broken_connection(error)
        # One that has failed or is lost is heard of a moment before or after what comes of it.
        patience = _BROKEN if broken else _MOMENT if isinstance(error, RankFailed) else 0.0
        if self.groups.lifeline.was_told(error):
            patience = 0.0
        failure = self.groups.lifeline.failure(patience)
        self.groups.lifeline.tell(error)
        self.groups.expect_failures()
        if failure is not None and broken:
            raise failure from error
        if failure is not None and not isinstance(error, RankFailed):
            add_note(error, f"{failure}")

    def explain(self, error: BaseException) -> None:
        """Raise RankFailed or OutOfStep in place of an error of the network, if one caused it."""
        cause = self._cause_of(error)
        if cause is not error:
            raise cause from error

    def _part(self) -> None:
        """Leave the others once all have come here: none waits for one that has ended."""
        self.meet("end")
        self.leave()

    def leave(self) -> None:
        if self.groups is not None:
            self.groups.leave()
            self.groups = None

    # Asking the others.

    @property
    def everyone(self) -> Group:
        assert self.groups is not None, "the processes are connected"
        return self.groups.everyone

    @property
    def across(self) -> ProcessGroup | None:
        """The processes that have this one's place in each replica; None without replicas."""
        return self.groups.across if self.groups is not None and self.replicated else None

    @property
    def pipeline_group(self) -> Group | None:
        """The processes of this pipeline, once they are connected, if it has several."""
        return None if self.groups is None else self.groups.pipeline

    @property
    def replica_group(self) -> Group | None:
        return None if self.groups is None else self.groups.replica

    def meet(self, purpose: str) -> None:
        if self.groups is not None:
            self.groups.everyone.meet(purpose)

    def broadcast(self, value: Any, source: int = 0) -> Any:
        return value if self.groups is None else self.groups.everyone.broadcast(value, source)

    def decide(self, decision: bool, *, all: bool) -> bool:
        if self.groups is None:
            return decision
        return self.groups.everyone.decide(bool(decision), all=all)

    def do_or_undo(self, do: Callable[[], None], undo: Callable[[], None]) -> None:
        """Call ``do`` in all processes; if one raises, ``undo`` in the others, and raise in all."""
        error: Exception | None = None
        try:
            do()
        except Exception as raised:
            error = raised
        if self.decide(error is not None, all=False):
            if error is None:
                undo()
                error = RuntimeError("another process has failed at this, so it is undone in all.")
            raise error

    def agree_on_memory(self, step: Callable[[], Any]) -> Any:
        """Return the result of a step, or raise in all processes if one has too little memory."""
        result, error = None, None
        try:
            result = step()
        except RuntimeError as raised:
            if not is_oom_error(raised):
                raise
            error = raised
        if self.decide(error is not None, all=False):
            raise error or RuntimeError("CUDA or host out of memory in another process")
        return result


def backend_for(device: torch.device) -> str:
    """Return the backend of torch.distributed for tensors on ``device`` and on the host."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
