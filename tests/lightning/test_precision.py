"""Nothing silent: Trainer(precision=...) applies inside the stages and their threads."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import GPipeStrategy
from tests.support.lightning_modules import WIDTH, Classifier, fitted, weights
from tests.support.models import Recorder


def recorded() -> Classifier:
    """A model in float32 that records what leaves the linear layer of each half."""
    half = [nn.Linear(6, WIDTH), Recorder(), nn.Tanh(), nn.Linear(WIDTH, WIDTH), Recorder()]
    return Classifier(layers=nn.Sequential(*half)).float()


def seen(model: Any) -> list[set[torch.dtype]]:
    return [set(layer.seen) for layer in model.layers if isinstance(layer, Recorder)]


@pytest.mark.parametrize(
    "mode, threads", [("always", True), ("except_last", True), ("never", True), ("always", False)]
)
@pytest.mark.parametrize(
    "precision, dtype, tolerance",
    [
        ("bf16-mixed", torch.bfloat16, 2e-2),
        ("bf16-true", torch.bfloat16, 5e-2),
        ("32-true", torch.float32, 1e-5),
        ("64-true", torch.float64, 1e-9),
    ],
)
def test_precision_inside_the_stages(
    tmp_path: Path, precision: Any, dtype: torch.dtype, tolerance: float, mode: Any, threads: bool
) -> None:
    run = partial(fitted, tmp_path, build=recorded, precision=precision)
    strategy = GPipeStrategy([3, 2], 4, activation_checkpointing=mode, threads=threads)

    plain = run()
    pipelined = run(strategy, devices=2)

    assert seen(pipelined.lightning_module) == [{dtype}, {dtype}] == seen(plain.lightning_module)
    torch.testing.assert_close(weights(pipelined), weights(plain), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("schedule", ["fill_drain", "1f1b"])
def test_running_statistics_in_float16(tmp_path: Path, schedule: Any) -> None:
    """Once the variance was NaN if the squares of a mini-batch added up to more than 65504."""

    class Sequences(Classifier):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.unsqueeze(2).expand(-1, -1, 30_000))

    def build() -> Sequences:
        pool = nn.Sequential(nn.AdaptiveAvgPool1d(1), nn.Flatten())
        return Sequences(layers=nn.Sequential(nn.BatchNorm1d(6), pool, nn.Linear(6, WIDTH)))

    run = partial(fitted, tmp_path, build=build, precision="16-true", max_epochs=1)

    plain = run()
    pipelined = run(GPipeStrategy([2, 2], 3, schedule=schedule), devices=2)

    for name in ("layers.0.running_mean", "layers.0.running_var"):
        expected = plain.lightning_module.get_buffer(name)
        torch.testing.assert_close(pipelined.lightning_module.get_buffer(name), expected)


def test_autocast_of_the_step_itself(tmp_path: Path) -> None:
    # Autocast that the user enters in training_step, not the Trainer's.
    class Casting(Classifier):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                x = self.layers(x.float())
            return self.head(x.float())

    def build() -> Casting:
        return Casting(layers=recorded().layers).float()

    pipelined = fitted(tmp_path, GPipeStrategy([3, 2], 4), build=build, devices=2)

    assert seen(pipelined.lightning_module) == [{torch.bfloat16}, {torch.bfloat16}]
