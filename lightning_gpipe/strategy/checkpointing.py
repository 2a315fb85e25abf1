"""Saves and loads the checkpoints of a pipeline that may have several processes.

A checkpoint is one file that the first process writes, or a folder to which each process of the
first pipeline writes its part. From a folder each process loads its own part, once it is known what
that is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from torch.optim import Optimizer
from typing_extensions import override

from lightning_gpipe.checkpoints import (
    REST,
    AtomicFiles,
    check_contents,
    drop_foreign_states,
    folder_of,
    load_model,
    load_optimizer,
    load_rest,
    load_state,
    load_values,
    make_room,
    on_cpu,
    optimizer_part,
    save_parts,
    set_aside,
)
from lightning_gpipe.distributed import (
    own_optimizer_keys,
    own_state,
    whole_optimizer_state,
    whole_state,
)
from lightning_gpipe.strategy.processes import Processes
from lightning_gpipe.strategy.refusals import refuse_in_parts

_IN_PARTS = ("state_dict", "optimizer_states")


def with_whole_files(io: CheckpointIO | None) -> CheckpointIO:
    """The user's CheckpointIO, or ours where Lightning would take its own."""
    if io is None:
        return AtomicFiles()
    if isinstance(io, _WrappingCheckpointIO):  # such as an asynchronous one
        io.checkpoint_io = AtomicFiles()
    return io


class Saver(ABC):
    """Saves checkpoints, in the processes that have a part in them.

    Args:
        processes: The processes of the Trainer.
    """

    def __init__(self, processes: Processes) -> None:
        self.processes = processes

    @abstractmethod
    def check(self, callbacks: Iterable[Callback], io: CheckpointIO) -> None:
        """Refuse what would have no effect on these checkpoints."""

    @abstractmethod
    def module_state(self, module: LightningModule) -> dict[str, Any]:
        """Return the state of the model that this process saves."""

    @abstractmethod
    def optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Return the part of an optimizer's state that this process saves."""

    @abstractmethod
    def save(
        self, checkpoint: dict[str, Any], path: str | Path, io: CheckpointIO, storage_options: Any
    ) -> None:
        """Save a checkpoint; all processes call this."""


class FileSaver(Saver):
    """Saves a checkpoint as one file, which the first process writes."""

    @override
    def check(self, callbacks: Iterable[Callback], io: CheckpointIO) -> None:
        pass  # any callback and any CheckpointIO will do

    @override
    def module_state(self, module: LightningModule) -> dict[str, Any]:
        group = self.processes.pipeline_group
        if group is None:
            return module.state_dict()
        return whole_state(module, group, self.processes.elsewhere)

    @override
    def optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        group = self.processes.pipeline_group
        return state if group is None else whole_optimizer_state(optimizer, state, group)

    @override
    def save(
        self, checkpoint: dict[str, Any], path: str | Path, io: CheckpointIO, storage_options: Any
    ) -> None:
        if self.processes.global_rank == 0:
            with set_aside(Path(path)):
                io.save_checkpoint(on_cpu(checkpoint), path, storage_options=storage_options)


class FolderSaver(Saver):
    """Saves a checkpoint as a folder, to which each process writes its part."""

    @override
    def check(self, callbacks: Iterable[Callback], io: CheckpointIO) -> None:
        refuse_in_parts(callbacks, io)

    @override
    def module_state(self, module: LightningModule) -> dict[str, Any]:
        group = self.processes.pipeline_group
        if group is None:
            return module.state_dict()
        return own_state(module, group, self.processes.elsewhere)

    @override
    def optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        group = self.processes.pipeline_group
        if group is None:
            own = list(state["state"])
            return optimizer_part(state, own, first=True, some=bool(own))
        own = own_optimizer_keys(optimizer, state["state"], group)
        some = group.decide(bool(own), all=False)
        return optimizer_part(state, own, first=group.rank == 0, some=some)

    @override
    def save(
        self, checkpoint: dict[str, Any], path: str | Path, io: CheckpointIO, storage_options: Any
    ) -> None:
        if storage_options is not None:
            raise TypeError(
                "storage_options is for a CheckpointIO; save_distributed_checkpoint=True writes "
                f"to a folder of this machine: got storage_options={storage_options!r}."
            )
        processes = self.processes
        first, group = processes.global_rank == 0, processes.pipeline_group
        folder = Path(processes.broadcast(str(path)))
        if first:
            make_room(folder)
        processes.meet("come to save a checkpoint")
        if processes.replica:
            return
        parts = {name: checkpoint.pop(name) for name in _IN_PARTS if name in checkpoint}
        whole = {**on_cpu(checkpoint), **parts}
        if group is None:
            save_parts(folder, whole, None, first=True)
            return
        with group.waiting_for("a part of a checkpoint"):
            save_parts(folder, whole, group.process_group, first=first)


class Loader:
    """Loads a checkpoint: a file at once, a folder once this process knows its part.

    Args:
        processes: The processes of the Trainer.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._folder: Path | None = None
        self._strict = True

    def load(self, path: str | Path, read: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """Read a file, or what a folder has beside the states of model and optimizers.

        Raises:
            RuntimeError: If the file is no checkpoint.
        """
        self._folder = folder_of(Path(self._processes.broadcast(str(path))))
        if self._folder is not None:
            return {**read(self._folder / REST), **load_rest(self._folder)}
        checkpoint = read(path)
        # Here and not in AtomicFiles, by which launchers bring bare weights home.
        check_contents(checkpoint, path)
        return checkpoint

    def load_before_setup(
        self, module: LightningModule, checkpoint: Mapping[str, Any], *, strict: bool
    ) -> None:
        """Load the model from a file; from a folder, see :meth:`load_part`."""
        self._strict = strict
        if self._folder is None:
            load_state(module, checkpoint["state_dict"], strict=strict)

    def load_part(self, module: LightningModule) -> None:
        """Load what this process has of the model, if the checkpoint is a folder."""
        if self._folder is not None:
            load_model(self._folder, module, strict=self._strict)

    def load_after_setup(
        self, module: LightningModule, checkpoint: Mapping[str, Any], *, strict: bool
    ) -> None:
        self._strict = strict
        if self._folder is None:
            load_values(module, checkpoint["state_dict"], strict=strict)
        self.load_part(module)

    def load_optimizers(
        self, optimizers: Sequence[Optimizer], checkpoint: Mapping[str, Any]
    ) -> None:
        # As Lightning does: an optimizer without a state there begins anew.
        states = zip(optimizers, checkpoint["optimizer_states"], strict=False)
        for k, (optimizer, state) in enumerate(states):
            if self._folder is not None:
                load_optimizer(self._folder, k, optimizer)
            else:
                optimizer.load_state_dict(state)  # puts each state on its parameter's device
                drop_foreign_states(optimizer)

    def release(self) -> None:
        self._folder = None
