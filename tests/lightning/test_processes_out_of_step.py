"""No hang: a Trainer ends in bounded time if one process does alone what all must do together.

All processes live, and each waits for another one, for ever but for the timeout of half an hour.
"""

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger

from tests.support.acts import Act, gather, meet, reduce, run_the_model, save, take_a_batch
from tests.support.lightning_modules import FEATURES, Classifier, Data
from tests.support.processes import said
from tests.support.ranks import new_ranks
from tests.support.trainers import trainer_over

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

LOST_AFTER = timedelta(seconds=4)


def stop(trainer: L.Trainer) -> None:
    trainer.should_stop = True


ACTS: dict[str, Act] = {
    each.__name__: each for each in (run_the_model, take_a_batch, save, stop, meet)
}


class Alone(Callback):
    """Does something in one process only, after a step."""

    def __init__(self, rank: int, act: Act, step: int = 2) -> None:
        self._at, self._act = (rank, step), act

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if (trainer.global_rank, trainer.global_step) == self._at:
            self._act(trainer)


def log(trainer: L.Trainer) -> None:
    trainer.lightning_module.log("own", 1.0, on_step=True, sync_dist=True)


ACTS_OF_REPLICAS: dict[str, Act] = {
    each.__name__: each for each in (log, reduce, gather, save, meet)
}


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


def fit_replicas(root: Path, act: str, rank: int, step: int) -> str:
    made = trainer_over(
        root,
        "single",
        [2, 4],
        {"replicas": 2, "lost_after": LOST_AFTER},
        machines=(4, 1),
        callbacks=[Alone(rank, ACTS_OF_REPLICAS[act], step)],
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
        users_line = rf"rank {rank} waits for [^;]* \(at \S+support/(acts|lightning_modules)\.py:"
        assert act == "stop" or re.search(users_line, message), message


def test_third_process_ends_too(tmp_path: Path) -> None:
    with new_ranks(3) as ranks:
        ranks.start(fit, tmp_path, "save", 1, [2, 2, 2])
        messages = [ranks.result(k) for k in range(3)]

    assert all(message.startswith("OutOfStep | all processes must do") for message in messages)
    assert all("rank 1 waits for the last process to save a checkpoint" in x for x in messages)


@pytest.mark.parametrize("act, step", [*zip(ACTS_OF_REPLICAS, [1, 1, 3, 5, 3], strict=True)])
def test_what_one_replica_does_alone_ends_all(tmp_path: Path, act: str, step: int) -> None:
    """Once its values could meet the gradients of the other replica."""
    with new_ranks(2) as ranks:
        ranks.start(fit_replicas, tmp_path, act, 0, step)
        messages = [ranks.result(k) for k in range(2)]

    for message in messages:
        assert message.startswith("OutOfStep | all processes must do the same in the same order")
        assert "rank 0 waits for " in message
        assert re.search("rank 1 waits for (a step|the gradients) of all replicas", message)


class Drawn(Classifier):
    """Has an example, with which a logger can draw it."""

    example_input_array = torch.zeros(4, FEATURES, dtype=torch.float64)


def draw_graph(root: Path) -> str:
    made = trainer_over(
        root,
        "per_stage",
        [2, 4],
        {"lost_after": LOST_AFTER},
        logger=TensorBoardLogger(root, log_graph=True),
        max_epochs=1,
    )
    return said(lambda: made.fit(Drawn(), datamodule=Data()))


def evaluate_again(root: Path, rank: int) -> str:
    """What a save says if one process evaluates once more before it."""
    made = trainer_over(root, "per_stage", [2, 4], {"lost_after": LOST_AFTER}, max_epochs=1)
    model = Classifier()
    made.fit(model, datamodule=Data())

    def evaluate_and_save() -> None:
        for _ in range(1 + (made.global_rank == rank)):
            made.validate(model, datamodule=Data(), verbose=False)
        made.save_checkpoint(root / "end.ckpt")

    return said(evaluate_and_save)


@pytest.mark.parametrize("rank", [0, 1])
def test_evaluation_that_one_process_calls_twice(tmp_path: Path, rank: int) -> None:
    with new_ranks(2) as ranks:
        ranks.start(evaluate_again, tmp_path, rank)
        messages = [ranks.result(k) for k in range(2)]

    for message in messages:
        assert message.startswith("OutOfStep | all processes must do the same in the same order")
        assert f"rank {1 - rank} waits for the last process to save a checkpoint" in message


def test_logger_that_draws_the_model_in_the_first_process(tmp_path: Path) -> None:
    with new_ranks(2) as ranks:
        ranks.start(draw_graph, tmp_path)
        messages = [ranks.result(k) for k in range(2)]

    assert messages[0].startswith("RuntimeError | what records a model, such as Tens")
    assert messages[1].startswith(
        "RankFailed | rank 0 (stage 0) failed: RuntimeError: what records"
    )
