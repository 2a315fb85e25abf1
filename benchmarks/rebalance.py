"""Claim: when a device gets slower in mid-fit, moving layers away from it brings throughput back.

Eight layers sleep for as long as a device would compute, so that the machine does not matter. From
the third epoch on those on the second device sleep three times as long. ``Rebalance`` then moves
layers. The weights are compared with those of the run without it, to the bit.

    python -m benchmarks.rebalance
"""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpipe import GPipeStrategy, Rebalance

LAYERS, EPOCHS, SLOW_FROM, STEPS = 8, 6, 2, 10


class Layer(nn.Module):
    """Takes a millisecond for each micro-batch, or three on a slow device."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.slow = False

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(3e-3 if self.slow else 1e-3)
        return self.linear(x).tanh()


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Slows(L.Callback):
    """Makes the second device slow, and measures each epoch."""

    def __init__(self) -> None:
        self.rows: list[tuple[list[int], float]] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(trainer.strategy, GPipeStrategy) and trainer.strategy.pipeline
        for j, stage in enumerate(trainer.strategy.pipeline.stages):
            for layer in stage.partition.layers:
                layer.slow = j == 1 and trainer.current_epoch >= SLOW_FROM  # type: ignore[assignment]
        self._balance, self._start = list(trainer.strategy.pipeline.balance), time.perf_counter()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.rows.append((self._balance, STEPS / (time.perf_counter() - self._start)))


def run(*callbacks: L.Callback) -> tuple[list[tuple[list[int], float]], dict[str, Tensor]]:
    torch.manual_seed(0)
    model, slows = Model(), Slows()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=EPOCHS,
        strategy=GPipeStrategy([4, 4], chunks=4),
        callbacks=[*callbacks, slows],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(TensorDataset(torch.rand(16 * STEPS, 16)), batch_size=16))
    return slows.rows, model.state_dict()


def main() -> None:
    moved, one = run(Rebalance())
    stayed, other = run()
    print("epoch  with Rebalance              without")
    for epoch, ((balance, rate), (_, without)) in enumerate(zip(moved, stayed, strict=True)):
        print(f"{epoch:>5}  {balance!s:<8} {rate:6.1f} steps/s   {without:12.1f} steps/s")
    same = all(map(torch.equal, one.values(), other.values()))
    print(f"weights equal to the bit: {same}")


if __name__ == "__main__":
    main()
