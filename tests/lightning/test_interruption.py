"""No hang: an interrupted fit leaves a plain model and no threads, and can be repeated.

See also ``tests/core``, where exceptions are raised in every kind of action.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import GPipeStrategy
from tests.support.faults import no_time_out
from tests.support.lightning_modules import (
    WIDTH,
    Classifier,
    Data,
    assert_same_weights,
    fitted,
    trainer,
)
from tests.support.process import workers


class Fuse(nn.Module):
    """The identity, until its error is set."""

    def __init__(self) -> None:
        super().__init__()
        self.error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None and torch.is_grad_enabled():
            raise self.error
        return x


class Fused(Classifier):
    """Raises in the layers of stage 1, or in training_step, in the second batch."""

    def __init__(self) -> None:
        layers = [nn.Linear(6, WIDTH), nn.Tanh(), self_fuse := Fuse(), nn.Linear(WIDTH, WIDTH)]
        super().__init__(layers=nn.Sequential(*layers))
        self.fuse = [self_fuse]  # in a list, so that it is a child of the layers alone
        self.in_layer: BaseException | None = None
        self.in_step: BaseException | None = None

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.fuse[0].error = self.in_layer if batch_idx == 1 else None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.in_step is not None and batch_idx == 1:
            raise self.in_step
        return loss

    def on_exception(self, exception: BaseException) -> None:
        self.fuse[0].error = None


@pytest.fixture(autouse=True)
def _no_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    no_time_out(monkeypatch)


@pytest.fixture
def model() -> Fused:
    torch.manual_seed(0)
    return Fused()


def check_plain(model: Fused) -> None:
    assert workers() == []
    assert "forward" not in model.layers.__dict__
    assert {p.device.type for p in model.parameters()} == {"cpu"}


@pytest.mark.parametrize("where", ["in_layer", "in_step"])
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_fit_that_raises(
    tmp_path: Path, model: Fused, where: str, kind: type[BaseException]
) -> None:
    setattr(model, where, kind("stop here"))
    made = trainer(tmp_path, GPipeStrategy([2, 2], 4), devices=2)
    # Lightning ends the program after a KeyboardInterrupt, with SystemExit.
    seen = SystemExit if kind is KeyboardInterrupt else kind

    with pytest.raises(seen) as error:
        made.fit(model, datamodule=Data())

    check_plain(model)
    if where == "in_layer" and kind is ValueError:
        stage = "raised in forward of micro-batch 0 of 4 on stage 1 (layers 2..3, cpu)"
        assert f"{stage}, in layer 2 (Fuse)" in error.value.__notes__


@pytest.mark.parametrize("where", ["in_layer", "in_step"])
def test_new_fit_after_one_that_raised(tmp_path: Path, model: Fused, where: str) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    setattr(model, where, ValueError("stop here"))
    with pytest.raises(ValueError, match="stop here"):
        trainer(tmp_path, GPipeStrategy([2, 2], 4), devices=2).fit(model, datamodule=Data())
    model.in_layer = model.in_step = None
    model.load_state_dict(before)

    again = trainer(tmp_path, GPipeStrategy([2, 2], 4), devices=2)
    again.fit(model, datamodule=Data())

    assert_same_weights(again, fitted(tmp_path, build=Fused))


def test_setup_that_fails(tmp_path: Path, model: Fused) -> None:
    with pytest.raises(ValueError, match="sum 5"):
        trainer(tmp_path, GPipeStrategy([2, 3]), devices=2).fit(model, datamodule=Data())

    check_plain(model)


def test_configure_optimizers_that_fails(tmp_path: Path, model: Fused) -> None:
    def fail() -> Any:
        raise ValueError("no optimizer")

    model.configure_optimizers = fail  # type: ignore[method-assign]  # the fault under test

    with pytest.raises(ValueError, match="no optimizer"):
        trainer(tmp_path, GPipeStrategy([2, 2]), devices=2).fit(model, datamodule=Data())

    check_plain(model)
