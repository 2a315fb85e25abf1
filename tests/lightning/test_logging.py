"""Layers that log, and metrics within layers.

Here are also the tests of ``methods``.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, SumMetric

from lightning_gpipe import GPipeStrategy
from tests.support.lightning_modules import (
    WIDTH,
    Classifier,
    Data,
    assert_same_weights,
    fitted,
    trainer,
)
from tests.support.models import assert_same
from tests.support.pipes import MODES, with_and_without_threads


class Logs(nn.Module):
    """A layer that logs with the LightningModule to which it refers."""

    def __init__(self, in_backward: bool = False, whole: bool = False) -> None:
        super().__init__()
        self.owner: list[L.LightningModule] = []
        self.in_backward = in_backward
        self.whole = whole

    def forward(self, x: Tensor) -> Tensor:
        if not self.in_backward:
            self.log(x)
        elif x.requires_grad:
            x.register_hook(self.log)
        return x * 1

    def log(self, x: Tensor) -> None:
        (module,) = self.owner
        if self.whole:
            module.log_dict({"activation": x.mean()})
        else:
            module.log("activation", x.mean())


def build(layer: Logs) -> Classifier:
    model = Classifier()
    model.layers[3] = layer
    layer.owner.append(model)
    return model


@with_and_without_threads
@pytest.mark.parametrize("options", [{}, {"whole": True}, {"in_backward": True}], ids=str)
def test_layer_that_logs(tmp_path: Path, threads: bool, options: dict[str, bool]) -> None:
    """Once it logged each micro-batch, and again in recomputation."""
    strategy = GPipeStrategy([2, 4], chunks=3, threads=threads)

    with pytest.raises(RuntimeError) as error:
        fitted(tmp_path, strategy, build=lambda: build(Logs(**options)), devices=2)

    assert str(error.value) == (
        "a layer of the pipeline must not call log: got log('activation') of Classifier, which "
        "would log each micro-batch, and again when it is recomputed. Return the value from the "
        "layers, and log it in training_step."
    )
    assert any("on stage 1 (layers 2..5, cpu)" in note for note in error.value.__notes__)


class Part(L.LightningModule):
    """A layer that is a LightningModule."""

    def forward(self, x: Tensor) -> Tensor:
        self.log("activation", x.mean())
        return x


def test_layer_that_is_a_lightning_module(tmp_path: Path) -> None:
    def build() -> Classifier:
        model = Classifier()
        model.layers[3] = Part()
        return model

    with pytest.raises(RuntimeError, match=r"log\('activation'\) of Part"):
        fitted(tmp_path, GPipeStrategy([2, 4], chunks=3), build=build, devices=2)


def test_copies_in_mid_fit_log_as_any_other(tmp_path: Path) -> None:
    class Copies(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, model: Any, *_: Any) -> None:
            torch.save(model, file := io.BytesIO())
            file.seek(0)
            copies.extend([copy.deepcopy(model), torch.load(file, weights_only=False)])

    copies: list[Any] = []

    made = fitted(tmp_path, GPipeStrategy([2, 4]), devices=2, max_steps=1, callbacks=[Copies()])

    for each in copies:
        assert each.log.__func__ is L.LightningModule.log
        assert each.log.__self__ is each
    assert "log" not in made.lightning_module.__dict__


class Measured(nn.Module):
    """A layer with metrics."""

    def __init__(self, **metrics: Metric) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.metrics = nn.ModuleDict(metrics)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            for metric in self.metrics.values():
                metric((x > 0).double())  # exact in every order
        return self.linear(x)


class Reports(Classifier):
    """Reports at the end of an epoch what its layers have measured."""

    def __init__(self, **metrics: Metric) -> None:
        super().__init__()
        self.layers[2] = self.measured = Measured(**metrics).double()
        self.found: list[Tensor] = []

    def on_train_epoch_end(self) -> None:
        for metric in self.measured.metrics.values():
            assert isinstance(metric, Metric)
            self.found.append(metric.compute())
            metric.reset()


def tensors() -> Reports:
    return Reports(sum=SumMetric(), mean=MeanMetric(), largest=MaxMetric())


def lists() -> Reports:
    return Reports(sum=SumMetric(), all=CatMetric())


@pytest.mark.parametrize("build, mode", [*((tensors, mode) for mode in MODES), (lists, "never")])
@with_and_without_threads
def test_metrics_in_a_layer(
    tmp_path: Path, build: Callable[[], Reports], mode: Any, threads: bool
) -> None:
    """Once 20 rows were counted as 34, because a recomputation updated them again."""
    strategy = GPipeStrategy([2, 4], 3, activation_checkpointing=mode, threads=threads)

    class Looks(L.Callback):
        def on_fit_end(self, trainer: L.Trainer, model: Any) -> None:
            found.append(model.found)

    found: list[list[Tensor]] = []
    plain = fitted(tmp_path, build=build, callbacks=[Looks()])

    pipelined = fitted(tmp_path, strategy, build=build, devices=2, callbacks=[Looks()])

    assert_same_weights(pipelined, plain)
    assert len(found[0]) >= 6
    assert_same(found[1], found[0])


def test_metric_with_a_list_in_a_layer_that_is_recomputed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="recomputed.*got layers.2.metrics.all. Return what"):
        fitted(tmp_path, GPipeStrategy([2, 4], 3), build=lists, devices=2)


def test_metric_with_a_list_in_a_layer_that_is_not_trained(tmp_path: Path) -> None:
    results = trainer(tmp_path, GPipeStrategy([2, 4], 3), devices=2).validate(
        lists(), datamodule=Data(), verbose=False
    )

    assert len(results) == 1
