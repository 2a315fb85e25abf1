"""The arguments of GPipeStrategy, checked before there is a pipeline or a process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from typing import Any, Literal, ParamSpec, get_args

from torch.nn.parallel import DistributedDataParallel

from lightning_gpipe.core.data import MicroBatching, check_microbatching
from lightning_gpipe.core.layout import (
    SHARDINGS,
    Around,
    ShardingName,
    Weights,
    check_around,
    check_balance,
)
from lightning_gpipe.core.pipeline import CRITERIA, Requested, balance_of_each, is_criterion
from lightning_gpipe.core.run import Threads, check_threads, greenlets
from lightning_gpipe.core.schedules import (
    ActivationCheckpointing,
    AnySchedule,
    OffloadActivations,
    as_block,
    check_schedule,
    is_by_micro_batch,
    is_folded,
)
from lightning_gpipe.core.transport import check_cores
from lightning_gpipe.distributed import Mode
from lightning_gpipe.strategy.compilation import check_compile

FROM_CHECKPOINT = "checkpoint"  # a balance

# Arguments of a single type, and what they must be.
_TYPES: dict[str, tuple[Any, str]] = {
    "deferred_batch_norm": (bool, "True or False"),
    "save_distributed_checkpoint": (bool, "True or False"),
    "timeout": (timedelta, "a datetime.timedelta"),
    "lost_after": (timedelta | None, "a datetime.timedelta or None"),
    "ddp": (dict | None, "a dict of options of DistributedDataParallel, or None"),
    "process_group_backend": (str | None, "the name of a backend of torch.distributed, or None"),
}

StartMethod = Literal["popen", "spawn", "fork"]
Outputs = Literal["all", "last", "auto"]

P = ParamSpec("P")


@dataclass(frozen=True)
class StrategyOptions:
    """The arguments of :class:`~lightning_gpipe.GPipeStrategy`, checked."""

    balance: Any
    chunks: int | Literal["auto"] | None
    module: str | list[str] | None
    schedule: AnySchedule | Literal["auto"]
    activation_checkpointing: ActivationCheckpointing | Literal["auto"] | None
    deferred_batch_norm: bool
    microbatching: MicroBatching | None
    compile: bool | dict[str, Any]
    threads: Threads
    cores: int | None
    split_backward: bool | Literal["auto"]
    verify: bool | Literal["sample"]
    around: Around
    weights: Weights | Literal["auto"]
    offload_activations: OffloadActivations | Literal["auto"]
    processes: Mode
    outputs: Outputs
    timeout: timedelta
    lost_after: timedelta | None
    process_group_backend: str | None
    start_method: StartMethod
    replicas: int
    tensor_parallel: int
    ddp: dict[str, Any] | None
    sharding: ShardingName | None
    save_distributed_checkpoint: bool

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> StrategyOptions:
        given = {field.name: values[field.name] for field in fields(cls)}
        if not isinstance(schedule := given["schedule"], str):
            given["schedule"] = as_block(schedule)
        return cls(**given)

    def __post_init__(self) -> None:
        self._check_types()
        self._check_processes()
        self._check_schedule()
        _check_module(self.module)
        for balance in self.balances:
            _check_balance(balance)
        if not (isinstance(self.verify, bool) or self.verify == "sample"):
            raise ValueError(f"verify must be True, False or 'sample': got {self.verify!r}.")
        self.requested(1, self.schedule).check()
        check_microbatching(self.microbatching)
        check_around(self.around)
        check_threads(self.threads)
        check_cores(self.cores)
        check_compile(self.compile)

    @property
    def balances(self) -> list[Any]:
        return balance_of_each(self.module, self.balance)

    @property
    def checkpointing(self) -> ActivationCheckpointing | Literal["auto"]:
        """The argument ``activation_checkpointing``, or its default for the schedule.

        With a loss for each micro-batch few are alive at a time, so none need be recomputed.
        """
        if self.activation_checkpointing is not None:
            return self.activation_checkpointing
        if self.schedule == "auto":
            return "auto"
        return "never" if is_by_micro_batch(self.schedule) else "except_last"

    def folded(self, workers: int) -> bool:
        """Return True if the stages go down the devices and back: the last is on the first."""
        return self.schedule != "auto" and is_folded(self.schedule, workers)

    @property
    def verified(self) -> bool | Literal["sample"]:
        """The argument ``verify``; a compiled model is not compiled anew for a sample."""
        sampled = not self.compile and not self.divides_parameters
        return self.verify is True or (sampled and self.verify)

    @property
    def divides_gradients(self) -> bool:
        return self.sharding in ("gradients", "parameters")

    @property
    def divides_parameters(self) -> bool:
        return self.sharding == "parameters"

    def same_everywhere(self) -> dict[str, Any]:
        """Return the options, which must be the same in all processes."""
        return {**vars(self), "activation_checkpointing": self.checkpointing}

    def requested(self, chunks: int, schedule: AnySchedule | Literal["auto"]) -> Requested:
        """Return the options that may be planned, with ``chunks`` if the user leaves it open."""
        number = chunks if self.chunks is None else self.chunks
        return Requested(
            number,
            self.checkpointing,
            schedule,
            self.split_backward,
            self.weights,
            self.offload_activations,
            self.sharding,
            self.replicas,
        )

    def _check_types(self) -> None:
        for name, (kind, must) in _TYPES.items():
            if not isinstance(value := getattr(self, name), kind):
                raise TypeError(f"{name} must be {must}: got {value!r}.")
        if self.timeout <= timedelta(0):
            raise ValueError(
                f"timeout must be positive: got {self.timeout!r}. Write a datetime.timedelta of "
                "minutes."
            )
        backend = self.process_group_backend
        if backend is not None and (self.processes, self.replicas) == ("single", 1):
            raise ValueError(
                "process_group_backend is for several processes: got "
                f"process_group_backend={backend!r}, processes='single'. Leave it out, or give "
                "processes."
            )

    def _check_processes(self) -> None:
        replicas, lost_after = self.replicas, self.lost_after
        if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1:
            raise ValueError(f"replicas must be a positive integer: got {replicas!r}.")
        if lost_after is not None and (
            (self.processes, replicas) == ("single", 1) or lost_after <= timedelta(0)
        ):
            raise ValueError(
                "lost_after must be positive, and is for several processes: got "
                f"lost_after={lost_after!r}, processes={self.processes!r}. Leave it out, or give "
                "processes and a datetime.timedelta."
            )
        kinds = {"processes": Mode, "outputs": Outputs, "start_method": StartMethod}
        for name, kind in kinds.items():
            value, words = getattr(self, name), get_args(kind)
            if value not in words:
                known = ", ".join(map(repr, words))
                raise ValueError(f"{name} must be one of {known}: got {value!r}.")
        if self.sharding not in SHARDINGS:
            known = ", ".join(map(repr, get_args(ShardingName)))
            raise ValueError(f"sharding must be None or one of {known}: got {self.sharding!r}.")
        if self.sharding is not None and replicas == 1:
            raise ValueError(
                f"sharding={self.sharding!r} divides what replicas have: got replicas=1. Leave it "
                "out, or write replicas=2 or more."
            )
        if self.divides_parameters:
            self._check_divided()
        self._check_tensor_parallel()
        if self.outputs == "last" and self.processes == "single":
            raise ValueError(
                "outputs='last' is for a pipeline of several processes: got processes='single'. "
                "Leave it out, or write processes='per_stage' or 'per_node'."
            )

    def _check_divided(self) -> None:
        """Refuse options that need all parameters of a stage in one process."""
        if self.weights != "device":
            raise ValueError(
                "sharding='parameters' keeps weights in the replicas, on their devices: got "
                f"weights={self.weights!r}. Write weights='device', or sharding='gradients'."
            )
        if self.verify is True:
            raise ValueError(
                "verify=True compares with layers that have all of their parameters: got "
                "sharding='parameters'. Verify in a run with sharding='gradients'."
            )
        if self.compile:
            raise ValueError(
                "sharding='parameters' lets weights come and go, which compiled layers do not "
                f"expect: got compile={self.compile!r}. Leave it out, or write "
                "sharding='gradients'."
            )

    def _check_tensor_parallel(self) -> None:
        shards = self.tensor_parallel
        if isinstance(shards, bool) or not isinstance(shards, int) or shards < 1:
            raise ValueError(f"tensor_parallel must be a positive integer: got {shards!r}.")
        if shards == 1:
            return
        if self.processes != "per_stage":
            raise ValueError(
                "tensor_parallel divides each stage among several processes with a device each: "
                f"got tensor_parallel={shards} with processes={self.processes!r}. Write "
                "processes='per_stage'."
            )
        others = {
            f"sharding={self.sharding!r}": self.sharding is not None,
            "outputs='last'": self.outputs == "last",
            "weights='host'": self.weights == "host",
        }
        refused = [name for name, is_so in others.items() if is_so]
        if refused:
            raise ValueError(
                f"tensor_parallel={shards} is for weights that each replica has as a whole, on "
                f"devices, and for outputs that all its processes get: got {', '.join(refused)}. "
                "Leave them out, or write tensor_parallel=1."
            )
        measured = self.requested(1, self.schedule).planned
        measured += [f"balance={x!r}" for x in self.balances if x in ("time", "memory")]
        if measured:
            raise ValueError(
                f"tensor_parallel={shards} has layers of which no process can measure its shard "
                f"alone: got {', '.join(measured)}. Write values for them, or balance='parameters'."
            )

    def _check_schedule(self) -> None:
        schedule = self.schedule
        check_schedule(schedule)
        if schedule != "auto" and not is_by_micro_batch(schedule):
            return
        greenlets()


def _check_module(module: Any) -> None:
    paths = module if isinstance(module, list | tuple) else [module]
    if module is not None and not (paths and all(isinstance(path, str) for path in paths)):
        raise TypeError(
            "module must be the path of a module in the LightningModule, such as 'net.layers', a "
            f"list of paths, or None: got {module!r}."
        )


def _check_balance(balance: Any) -> None:
    if isinstance(balance, str):
        if not (is_criterion(balance) or balance == FROM_CHECKPOINT):
            words = ", ".join(map(repr, (*CRITERIA, FROM_CHECKPOINT)))
            raise ValueError(
                f"balance must be a list, or one of {words}: got {balance!r}. To have it measured, "
                "write balance='time', with chunks='auto' for a plan of all settings."
            )
    elif not (isinstance(balance, list) and balance and all(isinstance(b, str) for b in balance)):
        check_balance(balance)


# The names of other packages for arguments of GPipeStrategy.
_ELSEWHERE = {
    "checkpoint": "activation_checkpointing",
    "microbatches": "chunks",
    "n_microbatches": "chunks",
    "num_microbatches": "chunks",
    "num_stages": "balance",
}


def refusing_unknown_arguments(construct: Callable[P, None]) -> Callable[P, None]:
    """Let a constructor refuse misspelt arguments, and those of DistributedDataParallel."""
    known = signature(construct).parameters

    @wraps(construct)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        for name in kwargs:
            if name not in known:
                raise TypeError(_unknown(name, known))
        construct(*args, **kwargs)

    return checked


def _unknown(name: str, known: Iterable[str]) -> str:
    meant = _ELSEWHERE.get(name) or next(iter(get_close_matches(name, known, n=1)), None)
    way_out = f"Did you mean {meant}?" if meant else "Leave it out."
    if name in signature(DistributedDataParallel).parameters:
        way_out = f"For replicas, write ddp={{{name!r}: ...}}; one pipeline has no use for it."
    return f"GPipeStrategy has no argument {name}. {way_out}"
