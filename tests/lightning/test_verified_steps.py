"""Reported: verify=True compares the loss of the first batch under other schedules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

from lightning_gpipe import GPipeStrategy
from tests.support.lightning_modules import (
    FEATURES,
    WIDTH,
    Classifier,
    Data,
    fitted,
    trainer,
    weights,
)

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


def piped(chunks: int = 4, **options: Any) -> dict[str, Any]:
    """The Trainer's arguments for three stages and a loss for each micro-batch."""
    given: dict[str, Any] = {"schedule": "1f1b", "verify": True} | options
    return {"strategy": GPipeStrategy([2, 2, 2], chunks, **given), "devices": 3}


def verdicts(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if message.startswith("verified")]


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_layers_and_loss_are_reported(
    schedule: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fitted(tmp_path, **piped(schedule=schedule))

    layers, loss = verdicts(caplog)
    assert layers.startswith("verified: a plain run and one in 4 micro-batches agree.")
    assert loss.startswith(
        "verified: a step on the whole batch and one for each of 4 micro-batches (weighted by "
        "rows) agree."
    )


class Padded(Classifier):
    """A mean over some rows, of which micro-batches have different numbers."""

    weighted = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        y = y.where(x[:, 0] > 0, -100)
        loss = F.cross_entropy(self(x), y, ignore_index=-100)
        return {"loss": loss, "loss_weight": (y >= 0).sum()} if self.weighted else loss


class Weighted(Padded):
    weighted = True


def test_loss_that_is_no_mean_ends_the_fit_before_the_first_step(tmp_path: Path) -> None:
    model = Padded()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    with pytest.raises(RuntimeError, match="return of how many: {'loss': loss, 'loss_weight'"):
        trainer(tmp_path, **piped()).fit(model, Data())

    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert "forward" not in vars(model.layers)
    assert "log" not in vars(model)


def test_loss_weight(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fitted(tmp_path, build=Weighted, **piped())

    assert "(weighted by loss_weight) agree." in verdicts(caplog)[-1]


def test_layer_that_mixes_rows_is_named(tmp_path: Path) -> None:
    class Mixing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0)

    model = Classifier()
    model.layers[1] = Mixing()
    with pytest.raises(RuntimeError, match=r"the output of layer 1 \('1', Mixing, stage 0"):
        trainer(tmp_path, **piped()).fit(model, Data())


@pytest.mark.filterwarnings("ignore:training_step must leave nothing on the module")
def test_known_reason_is_a_warning_and_training_goes_on(tmp_path: Path) -> None:
    class Normalised(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(FEATURES).double()

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.norm(x))

    with pytest.warns(UserWarning, match="'norm' is a BatchNorm1d, which normalises"):
        fitted(tmp_path, build=Normalised, max_epochs=1, **piped(3))


# Nothing else changes.


class Drops(Classifier):
    """Draws, logs, has a metric and a buffer, and keeps its losses."""

    rows: Tensor

    def __init__(self) -> None:
        super().__init__(
            layers=nn.Sequential(
                nn.Linear(FEATURES, WIDTH),
                nn.Dropout(),
                nn.Tanh(),
                nn.BatchNorm1d(WIDTH),
                nn.Linear(WIDTH, WIDTH),
                nn.Dropout(inplace=True),
            )
        )
        self.rate = MulticlassAccuracy(num_classes=3)
        self.register_buffer("rows", torch.zeros((), dtype=torch.int64))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.rows += len(x)
        output = self(x.add_(0.1 * torch.rand_like(x)))
        loss = F.cross_entropy(output, y)
        self.rate(output, y)
        self.log("rate", self.rate, on_step=False, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.losses.append(loss.item())
        return loss


class Gradients(Callback):
    """The largest gradient before each optimizer step."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, module: L.LightningModule, *_: Any) -> None:
        self.found.append(max(float(p.grad.abs().max()) for p in module.parameters()))  # type: ignore[union-attr]  # all have one


@pytest.mark.filterwarnings("ignore:training_step must leave nothing")
@pytest.mark.parametrize("threads", [True, False])
@pytest.mark.filterwarnings("ignore:verified")  # known reasons: a batch norm, and draws
def test_training_is_the_same_to_the_bit(threads: bool, tmp_path: Path) -> None:
    def run(verify: bool) -> tuple[Any, ...]:
        gradients = Gradients()
        made = fitted(
            tmp_path,
            build=Drops,
            shuffle=True,
            accumulate_grad_batches=2,
            callbacks=[gradients],
            **piped(3, verify=verify, threads=threads),
        )
        module = made.lightning_module
        assert isinstance(module, Drops)
        return weights(made), made.callback_metrics, gradients.found, module.losses

    one, other = run(True), run(False)

    torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert len(one[-1]) == 3 * 3 * 3, "epochs, batches and micro-batches, each run once"


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_first_batch_that_is_not_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[tuple[int, int]] = []

    class Skipping(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append((batch_idx, len(batch[0])))
            return None if batch_idx == 0 else super().training_step(batch, batch_idx)

    fitted(tmp_path, build=Skipping, max_epochs=2, **piped())

    assert len(verdicts(caplog)) == 2
    assert [each for each in seen if each[1] == 7] == [(1, 7)], "of the second batch"


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_lower_precision(precision: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Single(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.float()

    made = piped()
    if precision == "16-mixed":
        from lightning.pytorch.plugins import MixedPrecision

        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
        made["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler)]
    else:
        made["precision"] = precision
    fitted(tmp_path, build=Single, max_steps=1, **made)

    assert verdicts(caplog)[-1].endswith("allowed: 5.0e-02")


class Looping(Classifier):
    """Loops over its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(6))  # type: ignore[assignment]  # of other layers
        self.head = nn.Linear(FEATURES, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.head(x)


def test_model_that_loops_over_its_layers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    strategy = GPipeStrategy([2, 2, 2], 4, module="layers", schedule="1f1b", verify=True)
    fitted(tmp_path, strategy, build=Looping, devices=3, max_epochs=1)

    layers, loss = verdicts(caplog)
    assert "and with the model's own forward" in layers
    assert "micro-batches (weighted by rows) agree." in loss
