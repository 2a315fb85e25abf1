"""Replicas of a pipeline move the same layers between two epochs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_gpipe import GPipe, GPipeStrategy, LayerProfile, ModelProfile, Rebalance
from lightning_gpipe.callbacks import rebalance as module
from lightning_gpipe.core.balance import LinearCost
from lightning_gpipe.core.pipeline.choose import measuring
from lightning_gpipe.core.profile import Subject
from tests.lightning.test_replicas import Halves, Logging, assert_close, plain, result
from tests.support.ranks import Pool
from tests.support.trainers import trainer_over

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


class Moving(Callback):
    """Cuts by a balance of its own before each epoch but the first."""

    def __init__(self, ask: Callable[[L.Trainer], list[int]]) -> None:
        self._ask = ask
        self.balances: list[Any] = []
        self.errors: list[str] = []

    def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, GPipeStrategy) and strategy.pipeline is not None
        if trainer.current_epoch:
            try:
                strategy.rebalance(self._ask(trainer))
            except RuntimeError as error:
                self.errors.append(str(error))
        self.balances.append(list(strategy.pipeline.balance))


def fit(root: Path, callback: Any, **strategy: Any) -> Any:
    torch.manual_seed(0)
    model = Logging("adam")
    options = {"replicas": 2, "module": "layers", **strategy}
    made = trainer_over(root, "single", [2, 4], options, (4, 1), callbacks=[callback], max_epochs=3)
    made.fit(model, datamodule=Halves(2))
    return result(model, made)


def moved(root: Path) -> Any:
    moving = Moving(lambda trainer: [3, 3] if trainer.current_epoch == 1 else [5, 1])
    views = {"gradient_as_bucket_view": True}
    return moving.balances, fit(root, moving, ddp=views)


def test_layers_of_all_replicas_move(tmp_path: Path, two_ranks: Pool) -> None:
    expected = plain(tmp_path, "adam", max_epochs=3)

    found = two_ranks.run(moved, tmp_path)

    for balances, each in found:
        assert balances == [[2, 4], [3, 3], [5, 1]]
        assert_close(each, expected)


def refused(root: Path) -> Any:
    """Other balances in each replica; and one replica whose layers cannot move."""
    move = GPipe.rebalance

    def limited(pipeline: GPipe, balance: Any) -> None:
        if torch.distributed.get_rank() == 1 and balance == [3, 3]:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        move(pipeline, balance)

    def ask(trainer: L.Trainer) -> list[int]:
        return [1 + trainer.global_rank, 5] if trainer.current_epoch == 1 else [3, 3]

    moving = Moving(ask)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GPipe, "rebalance", limited)
        return moving.balances, moving.errors, fit(root, moving)


def test_replicas_that_do_not_move_together(tmp_path: Path, two_ranks: Pool) -> None:
    expected = plain(tmp_path, "adam", max_epochs=3)

    found = two_ranks.run(refused, tmp_path)

    for balances, _, each in found:
        assert balances == [[2, 4]] * 3
        assert_close(each, expected)
    (different, undone), (_, full) = (errors for _, errors, _ in found)
    assert "the balance of rebalance() is [2, 5] on rank 1 and [1, 5] on rank 0" in different
    assert undone == "another process has failed at this, so it is undone in all."
    assert full == "CUDA out of memory."


def rebalanced(root: Path) -> Any:
    """Layers of a second each, in stages whose times the first replica measures as others."""

    def profile_layers(subject: Subject, *_: Any, **__: Any) -> list[ModelProfile]:
        second = LinearCost(fixed=1.0)
        layers = tuple(LayerProfile(name, backward=second) for name in subject.names)
        around = LayerProfile("around")
        return [ModelProfile(layers, (), around, rows=2, chunks=2, unit="s", device="cpu")]

    def typical(observations: Any) -> list[float]:
        assert torch.distributed.get_rank() == 0 and observations
        return [20.0, 40.0] if not callback.shifts else [30.0, 30.0]

    callback = Rebalance()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "profile_layers", profile_layers)
        patch.setattr(module, "typical", typical)
        found = fit(root, callback)
    return len(callback.shifts), found


def test_callback_follows_the_first_replica(tmp_path: Path, two_ranks: Pool) -> None:
    expected = plain(tmp_path, "adam", max_epochs=3)

    (shifts, first), (none, second) = two_ranks.run(rebalanced, tmp_path)

    assert (shifts, none) == (1, 0)
    for each in (first, second):
        assert_close(each, expected)
