"""No hang: a Trainer ends in bounded time, with a name, if a process is lost or fails.

In a fit between two steps, and after it.
"""

import gc
import os
import re
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

from tests.support.faults import OwnError
from tests.support.lightning_modules import Classifier, Data
from tests.support.processes import said
from tests.support.ranks import new_ranks, pipeline_threads
from tests.support.trainers import trainer_over

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


class Fault(Callback):
    """Does something between two steps, in one process."""

    def __init__(self, rank: int, place: str, act: Callable[[], None]) -> None:
        self._rank, self._place, self._act = rank, place, act

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._come_to("step", trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._come_to("epoch", trainer)

    def on_save_checkpoint(self, trainer: L.Trainer, *_: Any) -> None:
        self._come_to("saving", trainer)

    def _come_to(self, place: str, trainer: L.Trainer) -> None:
        if place == self._place and trainer.global_rank == self._rank and trainer.global_step > 1:
            self._act()


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def burn() -> None:
    raise OwnError("burnt")


FAULTS = {"stop": stop, "die": die, "burn": burn}


def fit(root: Path, fault: str, rank: int, place: str) -> str:
    """What a fit says."""
    made = trainer_over(
        root,
        "per_stage",
        [2, 4],
        {"lost_after": timedelta(seconds=4 if fault == "burn" else 2)},
        callbacks=[Fault(rank, place, FAULTS[fault])],
        enable_checkpointing=place == "saving",
    )
    return said(lambda: made.fit(Classifier(), datamodule=Data()))


@pytest.mark.parametrize(
    "fault, rank, place",
    [
        ("stop", 0, "step"),
        ("stop", 1, "epoch"),
        ("die", 1, "saving"),
        ("burn", 0, "step"),
    ],
)
def test_process_that_fails_between_two_steps_is_named(
    tmp_path: Path, fault: str, rank: int, place: str
) -> None:
    with new_ranks(2) as ranks:
        ranks.start(fit, tmp_path, fault, rank, place)
        message = ranks.result(1 - rank)

    how = "failed: OwnError: burnt" if fault == "burn" else "is lost: "
    assert message.startswith(f"RankFailed | rank {rank} (stage {rank}) {how}")
    if (fault, place) == ("stop", "step"):
        assert re.search("nothing was heard for 2 s, while batch . in iteration . over a", message)


def save_after_fit(root: Path, fault: str, rank: int, folder: bool) -> str:
    """What a save says after a fit, to which one process does not come."""
    made = trainer_over(
        root,
        "per_stage",
        [2, 4],
        {"lost_after": timedelta(seconds=2), "save_distributed_checkpoint": folder},
        max_epochs=1,
    )
    made.fit(Classifier(), datamodule=Data())
    if made.global_rank == rank:
        FAULTS[fault]()
    return said(lambda: made.save_checkpoint(root / "end.ckpt"))


@pytest.mark.parametrize(
    "fault, rank, folder", [("stop", 1, False), ("stop", 0, True), ("die", 1, False)]
)
def test_process_that_is_lost_after_a_fit_is_named_by_a_save(
    tmp_path: Path, fault: str, rank: int, folder: bool
) -> None:
    """Once the others waited for their patience, half an hour unless it was given."""
    with new_ranks(2) as ranks:
        ranks.start(save_after_fit, tmp_path, fault, rank, folder)
        message = ranks.result(1 - rank)

    assert message.startswith(f"RankFailed | rank {rank} (stage {rank}) is lost: ")
    assert message.endswith(", while the last process to save a checkpoint of step 3 was awaited")


def train(root: Path) -> set[str]:
    """The threads of a process that has trained."""
    made = trainer_over(root, "per_stage", [2, 4], {}, max_epochs=1)
    made.fit(Classifier(), datamodule=Data())
    return set(pipeline_threads())


def save_alone(root: Path) -> str:
    """What a save says in one process if the other one has ended after the fit."""
    made = trainer_over(root, "per_stage", [2, 4], {}, max_epochs=1)
    made.fit(Classifier(), datamodule=Data())
    return said(lambda: made.save_checkpoint(root / "end.ckpt"))


def train_and_end(root: Path, rank: int) -> str:
    if dist.get_rank() != rank:
        return save_alone(root)
    train(root)
    gc.collect()
    os._exit(0)


def test_process_that_ends_after_a_fit_is_named_by_a_save(tmp_path: Path) -> None:
    with new_ranks(2) as ranks:
        ranks.start(train_and_end, tmp_path, 1)
        message = ranks.result(0)

    how = "rank 1 has ended, while the last process to save a checkpoint of step 3 was awaited"
    assert message == f"RankFailed | {how}"


def train_and_forget(root: Path) -> tuple[set[str], set[str]]:
    """The same before and after its Trainer is gone."""
    during = train(root)
    dist.barrier()  # the other one may have ended its threads, and then this one ends some too
    gc.collect()
    return during, set(pipeline_threads())


def test_processes_watch_one_another_for_as_long_as_there_is_a_trainer(tmp_path: Path) -> None:
    with new_ranks(2) as ranks:
        found = ranks.run(train_and_forget, tmp_path)

    for k, (during, after) in enumerate(found):
        assert during == {"gpipe-watch", f"gpipe-from-rank-{1 - k}"}
        assert not after


def fit_replicas(root: Path, rank: int) -> str:
    """What a fit of two replicas says, each in a process, of which one is stopped."""
    made = trainer_over(
        root,
        "single",
        [2, 4],
        {"replicas": 2, "lost_after": timedelta(seconds=2)},
        (4, 1),
        callbacks=[Fault(rank, "step", stop)],
    )
    try:
        made.fit(Classifier(), datamodule=Data())
    except RuntimeError as error:
        return " | ".join([str(error), *getattr(error, "__notes__", [])])
    return "none"


def test_replica_that_is_stopped_is_named(tmp_path: Path) -> None:
    with new_ranks(2) as ranks:
        ranks.start(fit_replicas, tmp_path, 1)
        message = ranks.result(0)

    assert "rank 1 is lost: nothing was heard for 2 s" in message


class Stopping(Classifier):
    """Stops one process before there is a pipeline."""

    def configure_model(self) -> None:
        if self.trainer.global_rank == 1:
            stop()


def fit_stopping(root: Path) -> str:
    made = trainer_over(root, "per_stage", [2, 4], {"lost_after": timedelta(seconds=2)})
    return said(lambda: made.fit(Stopping(), datamodule=Data()))


def test_process_that_is_stopped_while_it_starts_is_named(tmp_path: Path) -> None:
    with new_ranks(2) as ranks:
        ranks.start(fit_stopping, tmp_path)
        message = ranks.result(0)

    assert message.startswith("RankFailed | rank 1 is lost: nothing was heard for 2 s")
