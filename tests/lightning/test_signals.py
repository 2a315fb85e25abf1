"""No hang: SIGTERM to one process of a Trainer stops all after the same batch, with what they save.

Here are the tests of ``signals``. Once Lightning's handler waited for the others in the middle of a
step, and all hung.
"""

import os
import signal
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint

from lightning_gpipe import GPipeStrategy
from tests.support.faults import OwnError
from tests.support.lightning_modules import Classifier, Data, trainer
from tests.support.processes import said
from tests.support.ranks import new_ranks
from tests.support.trainers import RankEnvironment, trainer_over

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

LOST_AFTER = timedelta(seconds=6)  # a beat takes half a second


class Act(Callback):
    """Does something at a place, in one process, once."""

    def __init__(self, rank: int, place: str, act: Callable[[], None]) -> None:
        self._rank, self._place, self._act = rank, place, act

    def on_before_optimizer_step(self, trainer: L.Trainer, *_: Any) -> None:
        self._come_to("step", trainer)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._come_to("batch end", trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._come_to("epoch end", trainer)

    def on_validation_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            self._come_to("validation", trainer)

    def _come_to(self, place: str, trainer: L.Trainer) -> None:
        if (place, trainer.global_rank) == (self._place, self._rank) and trainer.global_step > 0:
            self._place = ""
            self._act()


class Slowly(Classifier):
    """Takes as long as a beat for each batch of some processes."""

    def __init__(self, slow: int) -> None:
        super().__init__()
        self._slow = slow

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_rank == self._slow:
            time.sleep(0.2)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def burn() -> None:
    raise OwnError("burnt")


ACTS = {each.__name__: each for each in (terminate, burn)}
# The processes, their balance, other arguments of the strategy, the number of devices.
PLACES: dict[str, Any] = {
    "pipeline": (2, "per_stage", [2, 4], {}, (2, 1)),
    "three": (3, "per_stage", [2, 2, 2], {}, (3, 1)),
    "replicas": (2, "single", [2, 4], {"replicas": 2}, (4, 1)),
}


def fit(root: Path, name: str, rank: int, place: str, act: str) -> tuple[str, int, list[str]]:
    """What a fit ends with, after which step, and what was warned of."""
    _, processes, balance, strategy, machines = PLACES[name]
    made = trainer_over(
        root,
        processes,
        balance,
        {"lost_after": LOST_AFTER, **strategy},
        machines,
        callbacks=[Act(rank, place, ACTS[act]), OnExceptionCheckpoint(root)],
        max_epochs=20,
        enable_checkpointing=True,
    )
    torch.manual_seed(0)
    message = "none"
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            made.fit(Slowly(1), datamodule=Data())
        except BaseException as error:
            message = f"{type(error).__name__} | {error}"
    return message, made.global_step, [str(each.message) for each in warned]


def fits(
    root: Path, name: str, rank: int, place: str, act: str
) -> list[tuple[str, int, list[str]]]:
    with new_ranks(PLACES[name][0]) as ranks:
        return ranks.run(fit, root, name, rank, place, act)


@pytest.mark.parametrize(
    "name, rank, place",
    [
        ("pipeline", 0, "step"),
        ("pipeline", 1, "step"),
        ("pipeline", 1, "batch end"),
        ("pipeline", 0, "validation"),
        ("pipeline", 1, "epoch end"),
        ("three", 2, "step"),
        ("replicas", 1, "step"),
        ("replicas", 0, "validation"),
    ],
)
def test_sigterm_to_one_process_stops_all_after_the_same_step(
    tmp_path: Path, name: str, rank: int, place: str
) -> None:
    found = fits(tmp_path, name, rank, place, "terminate")

    step = found[0][1]
    assert all(message.startswith("SIGTERMException") for message, _, _ in found), found
    assert {steps for _, steps, _ in found} == {step}
    assert 0 < step < 60
    saved = torch.load(tmp_path / "on_exception.ckpt", weights_only=False)
    assert saved["global_step"] == step
    assert not any(each.is_meta for each in saved["state_dict"].values())


@pytest.mark.parametrize(
    "name, place",
    [*((name, "step") for name in PLACES), ("pipeline", "batch end"), ("replicas", "validation")],
)
def test_error_is_told_before_callbacks_that_save_on_it(
    tmp_path: Path, name: str, place: str
) -> None:
    """Once it was told after them, so they waited for processes that knew nothing of it."""
    found = fits(tmp_path, name, 1, place, "burn")

    for rank, (message, _, _) in enumerate(found):
        own = message == "OwnError | burnt"
        assert own if rank == 1 else message.startswith("RankFailed | rank 1 "), found
        assert own or "failed: OwnError: burnt" in message


class Slurm(RankEnvironment, SLURMEnvironment):
    """A job of SLURM, whose tasks are the ranks of this test."""

    def __init__(self, on_each: int) -> None:
        RankEnvironment.__init__(self, on_each)
        self.auto_requeue = True
        self.requeue_signal = signal.SIGUSR1


def requeue() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


def fit_in_job(root: Path) -> tuple[str, int]:
    """What a fit ends with, and after which step, if one task gets SLURM's signal."""
    os.environ |= {"SLURM_JOB_ID": "77", "PATH": f"{root}{os.pathsep}{os.environ['PATH']}"}
    strategy = GPipeStrategy([2, 4], 3, processes="per_stage", lost_after=LOST_AFTER)
    callbacks = [Act(1, "step", requeue)]
    plugins = [Slurm(2)]
    made = trainer(root, strategy, devices=2, max_epochs=4, callbacks=callbacks, plugins=plugins)
    torch.manual_seed(0)
    return said(lambda: made.fit(Slowly(1), datamodule=Data())), made.global_step


def test_signal_of_slurm_to_one_task_saves_and_requeues_once(tmp_path: Path) -> None:
    """Lightning's handler would save in the middle of a step of one process."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\necho "$@" >> "$(dirname "$0")/requeued"\n', encoding="ascii")
    scontrol.chmod(0o755)

    with new_ranks(2) as ranks:
        found = ranks.run(fit_in_job, tmp_path)

    assert found == [("none", 12)] * 2, "SLURM ends the job, not the signal"
    assert (tmp_path / "requeued").read_text(encoding="ascii") == "requeue 77\n"
    saved = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=False)
    assert 1 <= saved["global_step"] < 12
    assert not any(each.is_meta for each in saved["state_dict"].values())
