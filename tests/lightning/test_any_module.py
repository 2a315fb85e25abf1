"""Unchanged model: a LightningModule around any module trains as without the strategy."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import GPipeStrategy
from tests.support.lightning_modules import (
    Classifier,
    Data,
    assert_same_weights,
    fitted,
    six_layers,
    trainer,
    weights,
)


class Body(nn.Module):
    """Calls its children as it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(6, 8)
        self.middle = nn.Linear(8, 8)
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(x).tanh()
        return self.up(self.middle(y).relu() + y)


def model() -> Classifier:
    torch.manual_seed(0)
    made = Classifier()
    made.layers = Body()  # type: ignore[assignment]  # no Sequential
    return made.double()


def trained(path: Path, **options: Any) -> Classifier:
    made = model()
    devices = options.pop("devices", 1)
    trainer(path, devices=devices, **options).fit(made, datamodule=Data())
    return made


@pytest.mark.parametrize("balance", [[1, 2], ["up"], "parameters"], ids=str)
def test_traced_module_trains_as_on_one_device(tmp_path: Path, balance: Any) -> None:
    plain = trained(tmp_path, strategy="auto")

    piped = trained(tmp_path, strategy=GPipeStrategy(balance, module="layers", chunks=3), devices=2)

    for one, other in zip(piped.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    assert "forward" not in vars(piped.layers)


def test_setup_says_what_was_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        trained(tmp_path, strategy=GPipeStrategy([1, 2], module="layers"), devices=2)

    assert "GPipe runs Classifier.layers (Body) as a pipeline: layers.down on cpu," in caplog.text


@pytest.mark.parametrize("kind", [Body, six_layers])
def test_second_name_of_a_module(tmp_path: Path, kind: Any) -> None:
    """Only the first name of a module was known."""

    def build() -> Classifier:
        made = Classifier()
        made.layers = made.backbone = kind().double()
        return made

    strategy = GPipeStrategy("parameters", module="backbone", chunks=3)
    piped = fitted(tmp_path, strategy, build=build, devices=2)

    assert_same_weights(piped, fitted(tmp_path, build=build))
    assert any(name.startswith("backbone.") for name in weights(piped))
