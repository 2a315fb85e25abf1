"""No hang: a Trainer ends in bounded time if one process does alone what all must do together.

All processes live, and each waits for another one, for ever but for the timeout of half an hour.
"""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from tests.support.lightning_modules import Classifier, Data
from tests.support.processes import said
from tests.support.ranks import new_ranks
from tests.support.trainers import trainer_over

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

LOST_AFTER = timedelta(seconds=4)


def run_the_model(trainer: L.Trainer) -> None:
    """Run a sample alone, as for a picture that is logged."""
    with torch.no_grad():
        trainer.lightning_module(next(iter(Data().train_dataloader()))[0])


def take_a_batch(trainer: L.Trainer) -> None:
    loader: Any = trainer.train_dataloader
    next(iter(loader))


def save(trainer: L.Trainer) -> None:
    trainer.save_checkpoint(Path(trainer.default_root_dir) / "own.ckpt")


def stop(trainer: L.Trainer) -> None:
    trainer.should_stop = True


def meet(trainer: L.Trainer) -> None:
    trainer.strategy.barrier("talk")


ACTS: dict[str, Callable[[L.Trainer], None]] = {
    each.__name__: each for each in (run_the_model, take_a_batch, save, stop, meet)
}


class Alone(Callback):
    """Does something in one process only, after the second step."""

    def __init__(self, rank: int, act: Callable[[L.Trainer], None]) -> None:
        self._rank, self._act = rank, act

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if (trainer.global_rank, trainer.global_step) == (self._rank, 2):
            self._act(trainer)


def fit(root: Path, act: str, rank: int, stages: list[int]) -> str:
    made = trainer_over(
        root,
        "per_stage",
        stages,
        {"lost_after": LOST_AFTER},
        machines=(len(stages), 1),
        callbacks=[Alone(rank, ACTS[act])],
    )
    return said(lambda: made.fit(Classifier(), datamodule=Data()))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("act", list(ACTS))
def test_what_one_process_does_alone_ends_all(tmp_path: Path, act: str, rank: int) -> None:
    with new_ranks(2) as ranks:
        ranks.start(fit, tmp_path, act, rank, [2, 4])
        messages = [ranks.result(k) for k in range(2)]

    for message in messages:
        assert message.startswith("OutOfStep | all processes must do the same in the same order")
        assert "rank 0 waits for " in message
        assert "rank 1 waits for " in message


def test_third_process_ends_too(tmp_path: Path) -> None:
    with new_ranks(3) as ranks:
        ranks.start(fit, tmp_path, "save", 1, [2, 2, 2])
        messages = [ranks.result(k) for k in range(3)]

    assert all(message.startswith("OutOfStep | all processes must do") for message in messages)
    assert all("rank 1 waits for the last process to save a checkpoint" in x for x in messages)
