"""Transparency: the other loops and options of a Trainer work as on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_gpipe import GPipeStrategy
from tests.support.lightning_modules import (
    Classifier,
    Data,
    assert_same_weights,
    fitted,
    rows,
    trainer,
)
from tests.support.models import Poison
from tests.support.pipes import every_mode, with_and_without_threads
from tests.support.process import workers


def strategy(**options: Any) -> GPipeStrategy:
    return GPipeStrategy([2, 4], chunks=3, **options)


@pytest.fixture
def model() -> Classifier:
    torch.manual_seed(0)
    return Classifier()


@pytest.mark.parametrize("method", ["validate", "test"])
def test_evaluation(tmp_path: Path, model: Classifier, method: str) -> None:
    plain = getattr(trainer(tmp_path), method)(model, datamodule=Data(), verbose=False)

    pipelined = getattr(trainer(tmp_path, strategy(), devices=2), method)(
        model, datamodule=Data(), verbose=False
    )

    assert len(pipelined) == 1 and len(pipelined[0]) == 2
    torch.testing.assert_close(pipelined, plain)


@pytest.mark.parametrize("inference_mode", [True, False])
def test_predict(tmp_path: Path, model: Classifier, inference_mode: bool) -> None:
    expected = model(rows(9, seed=2).tensors[0]).detach()
    seen: set[bool] = set()
    for layer in model.layers:
        layer.register_forward_hook(lambda *_: seen.add(torch.is_inference_mode_enabled()))

    predictions: Any = trainer(
        tmp_path, strategy(verify=False), devices=2, inference_mode=inference_mode
    ).predict(model, datamodule=Data())

    assert [len(batch) for batch in predictions] == [5, 4]
    assert seen == {inference_mode}
    assert not any(batch.requires_grad for batch in predictions)
    torch.testing.assert_close(torch.cat(predictions), expected)


def test_evaluation_leaves_no_trace(tmp_path: Path, model: Classifier) -> None:
    trainer(tmp_path, strategy(), devices=2).validate(model, datamodule=Data(), verbose=False)

    assert workers() == []
    assert "forward" not in model.layers.__dict__


def test_sanity_check_runs_in_the_pipeline(tmp_path: Path) -> None:
    class Looks(L.Callback):
        def on_sanity_check_end(self, trainer: L.Trainer, *_: Any) -> None:
            assert isinstance(trainer.strategy, GPipeStrategy)
            assert trainer.strategy.pipeline is not None
            timeline = trainer.strategy.pipeline.timeline
            assert timeline is not None
            ran.append(len(timeline.spans))

    ran: list[int] = []

    fitted(tmp_path, strategy(), devices=2, num_sanity_val_steps=1, callbacks=[Looks()])

    assert ran == [3 * 2], "one forward of each of 3 micro-batches on 2 stages"


def test_fast_dev_run(tmp_path: Path) -> None:
    plain = fitted(tmp_path, fast_dev_run=2)

    pipelined = fitted(tmp_path, strategy(), devices=2, fast_dev_run=2)

    assert pipelined.global_step == 2
    assert_same_weights(pipelined, plain)


def test_overfit_batches(tmp_path: Path) -> None:
    # Evaluation runs over the training data, in order.
    plain = fitted(tmp_path, overfit_batches=2)

    pipelined = fitted(tmp_path, strategy(), devices=2, overfit_batches=2)

    assert pipelined.global_step == 3 * 2
    assert_same_weights(pipelined, plain)


def test_batch_with_fewer_rows_than_chunks(tmp_path: Path, model: Classifier) -> None:
    data = DataLoader(rows(3, seed=4), batch_size=2)
    expected = model(data.dataset[:][0]).detach()

    predictions: Any = trainer(tmp_path, GPipeStrategy([3, 3], 8), devices=2).predict(model, data)

    torch.testing.assert_close(torch.cat(predictions), expected)


def test_fit_twice_with_one_trainer(tmp_path: Path) -> None:
    def twice(made: L.Trainer) -> L.Trainer:
        assert made.fit_loop.max_epochs is not None
        made.fit_loop.max_epochs += 2
        made.fit(made.lightning_module, datamodule=Data())
        return made

    plain = twice(fitted(tmp_path))

    pipelined = twice(fitted(tmp_path, strategy(), devices=2))

    assert pipelined.current_epoch == 5
    assert_same_weights(pipelined, plain)


def test_model_goes_from_one_trainer_to_the_next(tmp_path: Path, model: Classifier) -> None:
    for balance in ([3, 3], [1, 5], [2, 2, 2]):
        made = trainer(tmp_path, GPipeStrategy(balance, 4), devices=len(balance), max_epochs=1)
        made.fit(model, datamodule=Data())

    torch.manual_seed(0)
    reference = Classifier()
    for _ in range(3):
        made_plain = trainer(tmp_path, max_epochs=1)
        made_plain.fit(reference, datamodule=Data())

    torch.testing.assert_close(model.state_dict(), reference.state_dict(), rtol=1e-9, atol=1e-11)


class Adversaries(Classifier):
    """Two optimizers that take turns: one on the pipelined layers, one on the head."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]  # no loss
        x, y = batch
        for optimizer, sign in zip(self.optimizers(), (1, -0.1), strict=True):
            self.toggle_optimizer(optimizer)
            loss = sign * F.cross_entropy(self(x), y)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.seen.append([parameter.grad is None for parameter in self.parameters()])
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def on_fit_start(self) -> None:
        self.seen: list[list[bool]] = []

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.layers.parameters(), lr=0.01),
            torch.optim.SGD(self.head.parameters(), lr=0.1),
        ]


@every_mode
def test_manual_optimization_with_two_optimizers(tmp_path: Path, mode: Any) -> None:
    plain = fitted(tmp_path, build=Adversaries)

    pipelined = fitted(
        tmp_path,
        GPipeStrategy([2, 4], 3, activation_checkpointing=mode),
        build=Adversaries,
        devices=2,
    )

    assert_same_weights(pipelined, plain)
    assert pipelined.lightning_module.seen == plain.lightning_module.seen


class Skipper(Classifier):
    """No loss for the second batch of each epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:  # type: ignore[override]  # wider
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else loss


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_step_without_a_loss(tmp_path: Path) -> None:
    plain = fitted(tmp_path, build=Skipper)

    pipelined = fitted(tmp_path, strategy(), build=Skipper, devices=2)

    assert_same_weights(pipelined, plain)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.filterwarnings("ignore:Error detected in SqrtBackward0")
@with_and_without_threads
def test_detect_anomaly(tmp_path: Path, threads: bool) -> None:
    def build() -> Classifier:
        return Classifier(layers=nn.Sequential(nn.Linear(6, 8), Poison(), nn.Linear(8, 8)))

    with pytest.raises(RuntimeError, match="SqrtBackward0.*nan values") as error:
        fitted(
            tmp_path,
            GPipeStrategy([2, 1], 2, threads=threads),
            build=build,
            devices=2,
            detect_anomaly=True,
        )

    assert any("stage 0 (layers 0..1, cpu)" in note for note in error.value.__notes__)
