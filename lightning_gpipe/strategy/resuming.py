"""Runs that go on from a checkpoint with the balance and the random numbers they had.

When resuming mid-epoch, the data loader's iterator had already drawn its shuffle when the states
were saved; at an epoch's start it had not. Lightning makes the iterator before training begins in
both cases. So the states are set before it is made and, mid-epoch, again afterwards. Lightning
before 2.5.3 makes the iterator of a new epoch twice: then the states are set twice, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader, rank_zero_info

from lightning_gpipe.checkpoints import (
    States,
    saved_states,
    set_states,
    states_of,
    value_of_entry,
    with_entry,
    with_states,
)
from lightning_gpipe.core.pipeline import PipedModule, Requested, Resolved
from lightning_gpipe.core.schedules import is_possible
from lightning_gpipe.strategy.options import FROM_CHECKPOINT
from lightning_gpipe.strategy.processes import Processes

_SAVED = ("time", "memory", FROM_CHECKPOINT)


class MeasuredBalances:
    """The sizes of the stages of each pipelined module, as measured or read from a checkpoint.

    ``plan`` has the settings of the latest plan, with which an evaluation after a fit runs.
    """

    def __init__(self) -> None:
        self._sizes: dict[str, list[int]] = {}  # by the path of the module
        self.plan: Resolved | None = None
        self._origin = ""

    def load(self, checkpoint: Mapping[str, Any]) -> None:
        self._sizes = dict(value_of_entry(checkpoint, "balance") or {})
        self._origin = "from the checkpoint"

    def save(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        return with_entry(checkpoint, balance=dict(self._sizes)) if self._sizes else checkpoint

    def keep(
        self,
        modules: Sequence[PipedModule],
        balances: Sequence[Any],
        choice: Resolved,
    ) -> None:
        self._sizes = {
            piped.path: list(size)
            for piped, balance, size in zip(modules, balances, choice.balances, strict=True)
            if isinstance(balance, str) and balance in _SAVED
        }
        if choice.plan is not None:
            self.plan = choice
        self._origin = "that it had before"

    def replace(self, modules: Sequence[PipedModule], sizes: Sequence[Sequence[int]]) -> None:
        pairs = zip(modules, sizes, strict=True)
        self._sizes |= {x.path: list(size) for x, size in pairs if x.path in self._sizes}

    def known(
        self,
        modules: Sequence[PipedModule],
        balances: Sequence[Any],
        devices: int,
        requested: Requested,
    ) -> list[Any]:
        """Return the sizes of each module known before, if wanted and fitting, or its balance.

        They must fit the schedule and the number of micro-batches that are requested.
        """
        if len(modules) > 1:  # of which none is planned
            requested = requested._replace(schedule="fill_drain")
        pairs = zip(modules, balances, strict=True)
        return [self._balance_of(piped, each, devices, requested) for piped, each in pairs]

    def _balance_of(
        self, piped: PipedModule, balance: Any, devices: int, requested: Requested
    ) -> Any:
        if not isinstance(balance, str) or balance not in _SAVED:
            return balance
        sizes, units = self._sizes.get(piped.path, []), len(piped.frontend.units)
        if sum(sizes) == units and _fit(sizes, devices, requested):
            rank_zero_info(f"GPipe takes the balance of {piped.name} {self._origin}: {sizes}")
            return sizes
        if balance != FROM_CHECKPOINT:
            return balance
        content = f"{sizes} for {sum(sizes)} units" if sizes else "none"
        raise ValueError(
            "balance='checkpoint' takes the balance that a checkpoint has, which must fit: got "
            f"{content}, for the {units} units of {piped.name}, {devices} devices and "
            f"schedule={requested.schedule!r}. Resume with ckpt_path=, from a run with "
            "balance='time' or 'memory', or write balance='time'."
        )


def _fit(sizes: Sequence[int], devices: int, requested: Requested) -> bool:
    """Return True if a pipeline on the devices can have stages of these sizes."""
    if len(sizes) % devices or requested.schedule == "auto":
        return not len(sizes) % devices
    m = devices if requested.chunks == "auto" else requested.chunks
    return is_possible(requested.schedule, m, len(sizes), devices)


class RandomStates:
    """The random states of all processes, in checkpoints and when a run goes on from one."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._resumed: States | None = None  # from a checkpoint, until this process trains
        self._in_an_epoch = False
        self._loaders: list[Any] = []  # from which training begins

    def save(self, checkpoint: dict[str, Any], module: LightningModule) -> dict[str, Any]:
        """Return the checkpoint with the states, if a run can be resumed from it."""
        trainer = module._trainer
        # Weights alone, and a model that no Trainer has, have nothing to resume.
        if trainer is None or "optimizer_states" not in checkpoint:
            return checkpoint
        states = self._states_of_all(trainer)
        return with_states(checkpoint, states, in_an_epoch=_in_an_epoch(trainer))

    def load(self, checkpoint: Mapping[str, Any], trainer: Trainer) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._resumed, self._in_an_epoch = saved_states(
            checkpoint,
            self._processes.replica,
            self._processes.place_in_pipeline,
            self._processes.arrangement.in_each_pipeline,
        )

    def process_dataloader(self, dataloader: object, trainer: Trainer) -> None:
        if trainer.training and self._resumed is not None:
            self._loaders.append(dataloader)
            set_states(self._resumed, self._processes.own_devices, self._loaders)

    def on_train_start(self, trainer: Trainer) -> None:
        """Set the states before the next batch, if the iterator has drawn or is made again."""
        states = self._resumed
        if states is not None and (self._in_an_epoch or _iterator_is_made_again(trainer)):
            set_states(states, self._processes.own_devices, self._loaders)
        self.release()

    def release(self) -> None:
        self._resumed = None
        self._loaders = []

    def _states_of_all(self, trainer: Trainer) -> list[list[States]]:
        loaders = CombinedLoader(trainer.train_dataloader).flattened
        own = states_of(self._processes.own_devices, loaders)
        if self._processes.groups is None:
            return [[own]]
        states = self._processes.groups.everyone.gather(own)
        # Those of the processes of a stage are alike.
        rows = self._processes.arrangement.ranks[..., 0].tolist() if states else []
        return [[states[rank] for rank in row] for row in rows]


def _in_an_epoch(trainer: Trainer) -> bool:
    """Return True if the rest of the epoch comes before the next iterator over the batches.

    From its last step Lightning goes on with the next epoch, and leaves out the rest of this one.
    """
    epochs: Any = trainer.fit_loop.epoch_progress.current
    progress = trainer.fit_loop.epoch_loop.batch_progress
    batches: Any = progress.current
    if epochs.processed >= epochs.ready:
        return False
    more = not progress.is_last_batch and batches.ready < trainer.num_training_batches
    return bool(more or batches.completed >= batches.processed)


def _iterator_is_made_again(trainer: Trainer) -> bool:
    """Return True if a resumed run that begins an epoch makes its iterator twice, before 2.5.3."""
    loop = trainer.fit_loop
    made_once = isinstance(getattr(type(loop), "is_resuming", None), property)
    return not made_once and trainer.current_epoch > 0 and not loop.epoch_loop.restarting
