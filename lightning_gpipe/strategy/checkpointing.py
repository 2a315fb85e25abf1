"""Saves and loads the checkpoints of a pipeline that may have several processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from torch import nn
from torch.optim import Optimizer

from lightning_gpipe.checkpoints import (
    AtomicFiles,
    check_contents,
    drop_foreign_states,
    folder_of,
    load_into_stages,
    load_model,
    load_optimizer,
    load_optimizer_state,
    load_rest,
    load_state,
    make_room,
    on_cpu,
    optimizer_part,
    rest_of,
    save_parts,
    set_aside,
)
from lightning_gpipe.distributed import (
    Group,
    own_optimizer_keys,
    own_state,
    whole_optimizer_state,
    whole_state,
    without_shards,
)
from lightning_gpipe.strategy.processes import Processes
from lightning_gpipe.strategy.replicas.sharding import Sharding

_IN_PARTS = ("state_dict", "optimizer_states")


def with_whole_files(io: CheckpointIO | None) -> CheckpointIO:
    """Return the user's CheckpointIO, or ours where Lightning would take its own."""
    if io is None:
        return AtomicFiles()
    if isinstance(io, _WrappingCheckpointIO):  # such as an asynchronous one
        io.checkpoint_io = AtomicFiles()
    return io


class Checkpoints:
    """Saves and loads the checkpoints of a Trainer: files, or folders with a part for each process.

    A file is loaded at once, a folder once this process knows its part.
    """

    def __init__(self, processes: Processes, sharding: Sharding) -> None:
        self.elsewhere: set[str] = set()  # the paths of modules in stages of other processes
        self._processes = processes
        self._sharding = sharding
        self._sharded = processes.options.save_distributed_checkpoint
        self._folder: str | None = None  # from which the model is loaded
        self._strict = True

    # Saving, in the processes that have a part in it.

    def in_parts(self) -> bool:
        return self._value_group is not None

    def module_state(self, module: nn.Module) -> dict[str, Any]:
        trainer = getattr(module, "_trainer", None)
        step = "" if trainer is None else f" of step {trainer.global_step}"
        saves = self._saves(f"a checkpoint{step}")
        if not saves and not self._processes.options.divides_parameters:
            return {}
        group = self._value_group
        if group is None:
            return module.state_dict()
        if self._is_shard:
            without_shards(module.state_dict())  # for the first process of the stage
            return {}
        state_of = own_state if self._sharded else whole_state
        return state_of(module, group, self.elsewhere, self._kept)

    def optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        processes = self._processes
        saves = self._saves("the state of an optimizer")
        if not saves and processes.options.sharding is None:
            return {}
        group, place = self._optimizer_group, processes.place_in_pipeline
        if self._is_shard:
            without_shards(state["state"])
            return {}
        if not self._sharded:
            return state if group is None else whole_optimizer_state(optimizer, state, group, place)
        if group is None:
            own = list(state["state"])
            return optimizer_part(state, own, first=True, some=bool(own))
        own = own_optimizer_keys(optimizer, state["state"], group, place)
        some = group.decide(bool(own), all=False)
        return optimizer_part(state, own, first=group.rank == 0, some=some)

    def fetch(self, module: LightningModule) -> None:
        """Give the module of the first process the values of all, on the CPU."""
        processes, group = self._processes, self._value_group
        processes.meet("gather the model")
        if group is None or (processes.replica and not processes.options.divides_parameters):
            return
        state = whole_state(module, group, self.elsewhere, self._kept)
        if group.rank == 0 and processes.options.tensor_parallel > 1:
            module.load_state_dict(state, assign=True)  # whole, for the main process
        elif group.rank == 0:
            load_state(module, state, strict=True)

    def _saves(self, what: str) -> bool:
        """Wait until all processes are here; return True if this one saves something."""
        self._processes.meet(f"save {what}")
        return self._processes.groups is None or self._processes.replica == 0

    @property
    def _is_shard(self) -> bool:
        """True if the first process of this one's stage saves whole tensors in its place."""
        processes = self._processes
        return not self._sharded and processes.global_rank % processes.options.tensor_parallel > 0

    @property
    def _value_group(self) -> Group | None:
        """The processes with different values of parameters, if there are several."""
        divides = self._processes.options.divides_parameters
        return self._everyone if divides else self._processes.pipeline_group

    @property
    def _optimizer_group(self) -> Group | None:
        """The processes with different states of optimizers, if there are several."""
        divides = self._processes.options.sharding is not None
        return self._everyone if divides else self._processes.pipeline_group

    @property
    def _everyone(self) -> Group | None:
        return None if self._processes.groups is None else self._processes.groups.everyone

    @property
    def _kept(self) -> set[str] | None:
        """The names of the values that a process of a replica saves; None in the first replica."""
        return self._sharding.kept if self._processes.replica else None

    def save(
        self, checkpoint: dict[str, Any], path: str | Path, io: CheckpointIO, storage_options: Any
    ) -> None:
        if self._sharded:
            self._save_parts(checkpoint, path, storage_options)
        elif self._processes.global_rank == 0:
            with set_aside(str(path)):
                io.save_checkpoint(on_cpu(checkpoint), path, storage_options=storage_options)

    def _save_parts(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any
    ) -> None:
        if storage_options is not None:
            raise TypeError(
                "storage_options is for a CheckpointIO; save_distributed_checkpoint=True writes "
                f"without one: got storage_options={storage_options!r}. Set them in fsspec's "
                "configuration."
            )
        processes = self._processes
        first, group = processes.global_rank == 0, self._optimizer_group
        folder = processes.broadcast(str(path))
        if first:
            make_room(folder)
        processes.meet("come to save a checkpoint")
        if processes.replica and processes.options.sharding is None:
            return
        parts = {name: checkpoint.pop(name) for name in _IN_PARTS if name in checkpoint}
        whole = {**on_cpu(checkpoint), **parts}
        if group is None:
            save_parts(folder, whole, None, first=True)
            return
        if processes.options.tensor_parallel > 1:  # each process of a stage has a part, too
            group = processes.replica_group
        assert group is not None, "a pipeline of several processes is in a replica of several"
        with group.waiting_for("a part of a checkpoint"):
            save_parts(folder, whole, group.process_group, first=first)

    # Loading.

    def load(self, path: str | Path, read: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """Read a file, or the parts of a folder beside the states of model and optimizers."""
        if self._processes.split:
            path = self._processes.broadcast(str(path))  # a callback may have drawn its name
        self._folder = folder_of(str(path))
        if self._folder is not None:
            return {**read(rest_of(self._folder)), **load_rest(self._folder)}
        checkpoint = read(path)
        # Here and not in AtomicFiles, by which launchers bring bare weights home.
        check_contents(checkpoint, path)
        return checkpoint

    def load_model(
        self,
        module: LightningModule,
        checkpoint: Mapping[str, Any],
        *,
        strict: bool,
        is_set_up: bool,
    ) -> None:
        """Load the model; from a folder only if it is set up, else see :meth:`load_part`."""
        self._strict = strict
        if self._folder is None:
            load = load_into_stages if is_set_up else load_state
            load(module, checkpoint["state_dict"], strict=strict)
        elif is_set_up:
            self.load_part(module)

    def load_part(self, module: LightningModule) -> None:
        if self._folder is not None:
            load_model(self._folder, module, strict=self._strict)

    def load_optimizers(
        self, optimizers: Sequence[Optimizer], checkpoint: Mapping[str, Any]
    ) -> None:
        # As Lightning does: an optimizer without a state there begins anew.
        states = zip(optimizers, checkpoint["optimizer_states"], strict=False)
        for k, (optimizer, state) in enumerate(states):
            if self._folder is not None:
                load_optimizer(self._folder, k, optimizer)
            else:
                load_optimizer_state(optimizer, state)  # on the devices of its parameters
                drop_foreign_states(optimizer)

    def release(self) -> None:
        self._folder = None
