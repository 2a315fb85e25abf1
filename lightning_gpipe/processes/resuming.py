"""The strategy's side of runs that go on from a checkpoint with the random numbers they had.

See ``kept_generators`` for what is saved, and for when it is set. An epoch that a resumed run
begins, and for which no batch comes, is warned of.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader, rank_zero_warn
from typing_extensions import override

from lightning_gpipe.kept_generators import KeptGenerators, States, states_of, with_states
from lightning_gpipe.processes.batches import unshared
from lightning_gpipe.processes.launching import Terms
from lightning_gpipe.processes.saving import Saving


class Resuming(Saving):
    """A strategy of one Trainer, in one process or several.

    Args:
        terms: Which processes there are, and how they are started.
        save_distributed_checkpoint: Whether each process saves its part of a checkpoint itself.
    """

    def __init__(self, terms: Terms, save_distributed_checkpoint: bool) -> None:
        super().__init__(terms, save_distributed_checkpoint)
        self._generators = KeptGenerators()
        self._begun: int | None = None  # the epoch that a resumed run begins, until a batch comes

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        assert self.lightning_module is not None
        # More than the weights alone, of a model that a Trainer has: others have nothing to resume.
        if "optimizer_states" in checkpoint and self.lightning_module._trainer is not None:
            states = self._states_of_all()
            in_an_epoch = _in_an_epoch(self._trainer)
            checkpoint = with_states(checkpoint, states, in_an_epoch=in_an_epoch)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def take_generators(self, checkpoint: Mapping[str, Any]) -> None:
        """Train with the states that a checkpoint has, if a fit goes on from it."""
        if self._trainer.state.fn == TrainerFn.FITTING:
            place = 0 if self.pipeline_group is None else self.pipeline_group.rank
            processes = self._arrangement.in_each_pipeline
            self._generators.take(checkpoint, self.replica, place, processes)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        if self._trainer.training:
            self._generators.before_iterator(self._own_devices, dataloader)
        return super().process_dataloader(dataloader)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        again = _iterator_is_made_again(self._trainer)
        begins = self._generators.on_train_start(self._own_devices, again=again)
        self._begun = self._trainer.current_epoch if begins else None

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._warn_of_epochs_without_batches()

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self._warn_of_epochs_without_batches()

    def _warn_of_epochs_without_batches(self) -> None:
        if self._begun is None:  # most often
            return
        begun, now = self._begun, self._trainer.current_epoch
        self._begun = None
        if begun < now:
            rank_zero_warn(
                f"training went on in epoch {begun}, and no batch came before epoch {now}: a "
                "dataloader whose state was saved after the last step of an epoch may say that it "
                "has given all batches. Resume from a checkpoint of another step, or of the end of "
                "an epoch."
            )

    @override
    def teardown(self) -> None:
        self._generators.drop()
        super().teardown()

    @property
    def _trainer(self) -> Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    def _states_of_all(self) -> list[list[States]]:
        """Those of the processes of each pipeline, in the first process."""
        loaders = CombinedLoader(self._trainer.train_dataloader).flattened
        own = states_of(self._own_devices, map(unshared, loaders))
        if self._circles is None:
            return [[own]]
        everyone = self._circles.everyone
        if everyone.rank:
            everyone.send(own, 0)
            return []
        states = [own, *(everyone.receive(rank) for rank in range(1, everyone.size))]
        return [[states[rank] for rank in ranks] for ranks in self._arrangement.ranks]


def _in_an_epoch(trainer: Trainer) -> bool:
    """Whether what is left of the epoch comes before the next iterator over the batches.

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
    """Whether Lightning, before 2.5.3, makes an iterator as a resumed run begins an epoch, too."""
    loop = trainer.fit_loop
    made_once = isinstance(getattr(type(loop), "is_resuming", None), property)
    return not made_once and trainer.current_epoch > 0 and not loop.epoch_loop.restarting
