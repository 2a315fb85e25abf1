"""Claim: when a device gets slower in mid-fit, moving layers away from it brings throughput back.

Eight layers on two devices sleep in forward and in backward for as long as a device would compute,
so that the machine does not matter. After a third of the epochs those on the second device sleep
three times as long. Then ``Rebalance`` moves layers; beside it stands a fit without it. The time of
an epoch is that from its beginning to its end; what it takes to measure and to move is between two
epochs, and is a row of its own. At the end the weights of both are compared, to the bit.

    python -m benchmarks.rebalance
    python -m benchmarks.rebalance --epochs 9 --steps 20

Throughput after the move / without must be at least 1.5, and no tensor of the weights may differ.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness import Options, Report, options
from lightning_gpipe import GPipeStrategy, Rebalance

LAYERS, SLOWER, ROWS, WIDTH = 8, 3, 16, 16
FORWARD, BACKWARD = 1e-3, 2e-3  # seconds of a layer for each micro-batch


class _Sleeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        time.sleep(FORWARD * factor)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        time.sleep(BACKWARD * ctx.factor)
        return gradient, None


class Layer(nn.Module):
    """A layer that takes some time, on a slow device more."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.factor = 1

    def forward(self, x: Tensor) -> Tensor:
        return _Sleeping.apply(self.linear(x).tanh(), self.factor)


class Model(L.LightningModule):
    """The layers, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.example_input_array = torch.rand(ROWS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


@dataclass(frozen=True)
class Epoch:
    """What was seen of an epoch."""

    balance: list[int]
    steps_per_second: float


class Slows(L.Callback):
    """Makes the second device slower after some epochs, and measures each epoch."""

    def __init__(self, slow_from: int) -> None:
        self.epochs: list[Epoch] = []
        self._slow_from = slow_from
        self._start = 0.0

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(trainer.strategy, GPipeStrategy) and trainer.strategy.pipeline
        slow = trainer.current_epoch >= self._slow_from
        for j, stage in enumerate(trainer.strategy.pipeline.stages):
            for layer in stage.partition.layers:
                layer.factor = SLOWER if slow and j == 1 else 1  # type: ignore[assignment]
        self._balance = list(trainer.strategy.pipeline.balance)
        self._start = time.perf_counter()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        took = time.perf_counter() - self._start
        self.epochs.append(Epoch(self._balance, trainer.num_training_batches / took))


def fit(given: Options, *callbacks: L.Callback) -> tuple[list[Epoch], dict[str, Tensor]]:
    """Train; returns what was seen of each epoch, and the weights."""
    torch.manual_seed(0)
    model, slows = Model(), Slows(given.epochs // 3)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=given.epochs,
        strategy=GPipeStrategy([LAYERS // 2] * 2, chunks=4),
        callbacks=[*callbacks, slows],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = TensorDataset(torch.rand(ROWS * given.steps, WIDTH))
    trainer.fit(model, DataLoader(data, batch_size=ROWS))
    return slows.epochs, model.state_dict()


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    given = options("rebalance", __doc__, rounds=1, argv=argv, epochs=6, steps=10)
    moved, weights = fit(given, Rebalance())
    stayed, others = fit(given)
    report = Report(
        given,
        f"Epochs of {given.steps} steps; one device {SLOWER} times slower from {given.epochs // 3}",
        columns=("epoch", "balance", "steps/s", "steps/s without Rebalance"),
    )
    for number, (one, other) in enumerate(zip(moved, stayed, strict=True)):
        speeds = f"{one.steps_per_second:.1f}", f"{other.steps_per_second:.1f}"
        report.rows.append((f"{number}", f"{one.balance}", *speeds))

    slow_from = given.epochs // 3
    before = median(each.steps_per_second for each in moved[:slow_from])
    slow = moved[slow_from].steps_per_second
    after = median(each.steps_per_second for each in moved[slow_from + 1 :])
    without = median(each.steps_per_second for each in stayed[slow_from + 1 :])
    report.target("throughput, one device slower / before", slow / before)
    report.target("throughput, after the move / before", after / before)
    report.target("throughput, after the move / without Rebalance", after / without, at_least=1.5)
    differ = sum(not torch.equal(weights[name], others[name]) for name in weights)
    report.target(f"tensors of {len(weights)} that differ at the end", differ, at_most=0)
    report.publish()


if __name__ == "__main__":
    main()
