"""The strategy's side of checkpoints: all processes come to one, those of one pipeline make it.

It is one file that the first process writes, or a folder to which each writes its part. From a
folder each process loads what it has, once that is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from torch.optim import Optimizer
from typing_extensions import override

from lightning_gpipe.checkpoint_io import drop_foreign_states, on_cpu
from lightning_gpipe.processes.gathering import (
    own_optimizer_keys,
    own_state,
    whole_optimizer_state,
    whole_state,
)
from lightning_gpipe.processes.launching import Launched, Terms
from lightning_gpipe.sharded import (
    REST,
    folder_of,
    load_model,
    load_optimizer,
    load_rest,
    make_room,
    optimizer_part,
    save_parts,
    set_aside,
)
from lightning_gpipe.unreadable import check_contents
from lightning_gpipe.whole_files import WholeFiles


class Saving(Launched):
    """A strategy of one Trainer, in one process or several.

    Args:
        terms: Which processes there are, and how they are started.
        save_distributed_checkpoint: Whether each process saves its part of a checkpoint itself.
    """

    def __init__(self, terms: Terms, save_distributed_checkpoint: bool) -> None:
        super().__init__(terms)
        self._in_parts = save_distributed_checkpoint
        self._folder: Path | None = None  # from which this process loads its part

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        if self._checkpoint_io is None:
            self._checkpoint_io = WholeFiles()
        elif isinstance(self._checkpoint_io, _WrappingCheckpointIO):  # such as an asynchronous one
            self._checkpoint_io.checkpoint_io = WholeFiles()
        return self._checkpoint_io

    @checkpoint_io.setter
    @override
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        if self._must_not_save():
            return {}
        if self.pipeline_group is None:
            return super().lightning_module_state_dict()
        state_of = own_state if self._in_parts else whole_state
        return state_of(self.lightning_module, self.pipeline_group, self._elsewhere)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self._must_not_save():
            return {}
        state: dict[str, Any] = super().optimizer_state(optimizer)
        group = self.pipeline_group
        if not self._in_parts:
            return state if group is None else whole_optimizer_state(optimizer, state, group)
        if group is None:
            own = list(state["state"])
            return optimizer_part(state, own, first=True, some=bool(own))
        own = own_optimizer_keys(optimizer, state["state"], group)
        some = group.decide(bool(own), all=False)
        return optimizer_part(state, own, first=group.rank == 0, some=some)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        if not self._in_parts:
            if self.is_global_zero:
                with set_aside(Path(filepath)):
                    super().save_checkpoint(on_cpu(checkpoint), filepath, storage_options)
            return
        if storage_options is not None:
            raise TypeError(
                "storage_options is for a CheckpointIO; save_distributed_checkpoint=True writes "
                f"to a folder of this machine: got storage_options={storage_options!r}."
            )
        path = Path(self.broadcast(str(filepath)))
        if self.is_global_zero:
            make_room(path)
        self.barrier("save a checkpoint")
        if not self.replica:
            names = ("state_dict", "optimizer_states")
            parts = {name: checkpoint.pop(name) for name in names if name in checkpoint}
            whole = {**on_cpu(checkpoint), **parts}
            group = self.pipeline_group
            if group is None:
                save_parts(path, whole, None, first=True)
                return
            with group.waiting_for("a part of a checkpoint"):
                save_parts(path, whole, group.process_group, first=self.is_global_zero)

    @override
    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self._folder = folder_of(Path(self.broadcast(str(checkpoint_path))))
        if self._folder is None:
            checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
            # Here and not in WholeFiles, by which launchers bring bare weights home.
            check_contents(checkpoint, checkpoint_path)
            return checkpoint
        rest = super().load_checkpoint(self._folder / REST, *args, **kwargs)
        return {**rest, **load_rest(self._folder)}

    def load_part(self, *, strict: bool) -> None:
        """Load what this process has of the model from a folder, if a checkpoint is one."""
        assert self.lightning_module is not None
        if self._folder is not None:
            load_model(self._folder, self.lightning_module, strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        # As Lightning does: an optimizer without a state there begins anew.
        states = zip(self.optimizers, checkpoint["optimizer_states"], strict=False)
        for k, (optimizer, state) in enumerate(states):
            if self._folder is not None:
                load_optimizer(self._folder, k, optimizer)
            else:
                optimizer.load_state_dict(state)  # puts each state on its parameter's device
                drop_foreign_states(optimizer)

    def _must_not_save(self) -> bool:
        """Wait for all processes; returns whether this one has no part in a checkpoint."""
        if self._circles is None:
            return False
        self._circles.everyone.meet("save a checkpoint")
        return self.replica > 0
