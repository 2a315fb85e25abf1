"""Layers that move between GPUs take their gradients, optimizer state and averages along."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import nn

from lightning_gpipe import GPipe, GPipeStrategy
from tests.gpu.trainers import Deep, needs, piped, plain
from tests.support.lightning_modules import assert_same_weights

pytestmark = needs(2)


class Moves(L.Callback):
    """Moves layers before every epoch but the first."""

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch:
            assert isinstance(trainer.strategy, GPipeStrategy)
            trainer.strategy.rebalance([1, 7] if trainer.current_epoch % 2 else [6, 2])
            (optimizer,) = trainer.optimizers
            for parameter, state in optimizer.state.items():
                elsewhere = {x.device for x in state.values() if x.dim()} - {parameter.device}
                assert not elsewhere
            for layer, device in zip(
                trainer.strategy.pipeline or (), expected(trainer.current_epoch), strict=True
            ):
                assert {str(parameter.device) for parameter in layer.parameters()} <= {device}


def expected(epoch: int) -> list[str]:
    balance = [1, 7] if epoch % 2 else [6, 2]
    return [f"cuda:{j}" for j, size in enumerate(balance) for _ in range(size)]


def build() -> Deep:
    return Deep(optimizer="adam")


@pytest.mark.parametrize(
    "callbacks", [list, lambda: [StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)]]
)
def test_fit(tmp_path: Path, callbacks: Any) -> None:
    options: dict[str, Any] = {"build": build, "max_epochs": 4}

    moved = piped(tmp_path, 2, callbacks=[*callbacks(), Moves()], **options)

    assert_same_weights(moved, plain(tmp_path, callbacks=callbacks(), **options))


def test_gradients_move() -> None:

    model = GPipe(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), [2, 2], chunks=2)
    model(torch.rand(4, 4, device="cuda:0")).sum().backward()

    model.rebalance([1, 3])

    assert all(p.grad is not None and p.grad.device == p.device for p in model.parameters())
    model(torch.rand(4, 4, device="cuda:0")).sum().backward()
    model.close()
