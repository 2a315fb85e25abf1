"""Transparency: a pipelined fit has the results and the logs of a plain fit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from lightning_gpipe import GPipeStrategy
from tests.support.lightning_modules import (
    WIDTH,
    Classifier,
    assert_same_weights,
    fitted,
    six_layers,
    weights,
)
from tests.support.pipes import MODES, with_and_without_threads


class History(Callback):
    """Every value of ``callback_metrics`` after each batch and each epoch."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.seen.append(dict(trainer.callback_metrics))

    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.seen.append(dict(trainer.callback_metrics))

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.seen.append(dict(trainer.callback_metrics))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> L.Trainer:
    """The fit on one device of what the tests fit in a pipeline."""
    return fitted(tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate_grad_batches": 3},
        {"gradient_clip_val": 0.05},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2},
    ],
    ids=["plain", "accumulated", "clipped-by-norm", "clipped-by-value", "clipped-accumulated"],
)
def test_fit_under_trainer_options(tmp_path: Path, optimizer: str, options: dict[str, Any]) -> None:
    build = partial(Classifier, optimizer=optimizer)

    plain = fitted(tmp_path, build=build, **options)
    pipelined = fitted(tmp_path, GPipeStrategy([2, 4], chunks=4), build=build, devices=2, **options)

    assert pipelined.global_step == plain.global_step
    assert_same_weights(pipelined, plain)


@pytest.mark.parametrize("options", [{"gradient_clip_val": 0.05}, {"accumulate_grad_batches": 3}])
def test_trainer_options_of_these_tests_matter(
    tmp_path: Path, plain: L.Trainer, options: dict[str, Any]
) -> None:
    changed = weights(fitted(tmp_path, **options))["layers.0.weight"]

    assert not torch.allclose(changed, weights(plain)["layers.0.weight"])


@pytest.mark.parametrize(
    "balance, devices, chunks",
    [
        ([6], 1, 1),
        ([1, 5], 2, 1),
        ([5, 1], 2, 2),
        ([3, 3], 2, 3),
        ([3, 3], 2, 20),
        ([2, 2, 2], 3, 5),
        ([1, 2, 1, 2], 4, 4),
        ([1, 2, 1, 2], 2, 4),
        ([1, 1, 1, 1, 1, 1], 3, 2),
        ("parameters", 2, None),
        ("parameters", 3, 7),
    ],
)
def test_fit_with_any_balance(
    tmp_path: Path, plain: L.Trainer, balance: Any, devices: int, chunks: int
) -> None:
    pipelined = fitted(tmp_path, GPipeStrategy(balance, chunks), devices=devices)

    assert_same_weights(pipelined, plain)


@pytest.mark.parametrize("mode", [*MODES, 0, 100])
@with_and_without_threads
def test_fit_with_any_recomputation(
    tmp_path: Path, plain: L.Trainer, mode: Any, threads: bool
) -> None:
    strategy = GPipeStrategy([3, 3], 4, activation_checkpointing=mode, threads=threads)

    pipelined = fitted(tmp_path, strategy, devices=2)

    assert_same_weights(pipelined, plain)


def test_fit_on_shuffled_batches(tmp_path: Path, plain: L.Trainer) -> None:
    shuffled = fitted(tmp_path, shuffle=True)

    pipelined = fitted(tmp_path, GPipeStrategy([3, 3], chunks=4), devices=2, shuffle=True)

    assert_same_weights(pipelined, shuffled)
    assert not torch.allclose(weights(shuffled)["head.weight"], weights(plain)["head.weight"])


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_fit_with_a_learning_rate_schedule(tmp_path: Path, optimizer: str) -> None:
    build = partial(Classifier, optimizer=optimizer, scheduled=True)

    plain = fitted(tmp_path, build=build)
    pipelined = fitted(tmp_path, GPipeStrategy([3, 3], chunks=4), build=build, devices=2)

    assert_same_weights(pipelined, plain)


@pytest.mark.parametrize("chunks", [2, 3])
def test_running_statistics_of_a_batch_norm(tmp_path: Path, chunks: int) -> None:
    # First in the pipeline its input is the data, whichever way the layers behind it train.
    def build() -> Classifier:
        layers = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, WIDTH), nn.Tanh())
        return Classifier(layers=layers)

    plain = fitted(tmp_path, build=build)
    pipelined = fitted(tmp_path, GPipeStrategy([2, 1], chunks), build=build, devices=2)

    for name in ("running_mean", "running_var", "num_batches_tracked"):
        key = f"layers.0.{name}"
        torch.testing.assert_close(weights(pipelined)[key], weights(plain)[key])


def test_logged_values(tmp_path: Path) -> None:
    plain, pipelined = History(), History()

    fitted(tmp_path, callbacks=[plain])
    fitted(tmp_path, GPipeStrategy([3, 3], chunks=4), devices=2, callbacks=[pipelined])

    assert len(pipelined.seen) == 3 * (3 + 1 + 1) + 1  # batches, validation, end; the sanity check
    assert {"train_loss_step", "train_loss_epoch", "val_loss", "val_accuracy"} <= set(
        pipelined.seen[-1]
    )
    torch.testing.assert_close(pipelined.seen, plain.seen, rtol=1e-7, atol=1e-7)


def test_dropout_is_the_same_under_the_same_seed(tmp_path: Path) -> None:
    def build() -> Classifier:
        half = [nn.Linear(6, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)]
        return Classifier(layers=nn.Sequential(*half))

    one, other = (
        fitted(tmp_path, GPipeStrategy([2, 2], chunks=4), build=build, devices=2) for _ in range(2)
    )

    assert all(map(torch.equal, weights(one).values(), weights(other).values()))


class Scaled(nn.Sequential):
    """Layers with a parameter of their own, which a hook uses."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.scale = nn.Parameter(torch.ones(()))
        self.calls = 0
        self.register_forward_hook(Scaled.after)

    def after(self, x: Any, y: Tensor) -> Tensor:
        self.calls += 1
        return y * self.scale


def test_hook_on_the_layers_and_a_parameter_of_the_sequential(tmp_path: Path) -> None:
    def build() -> Classifier:
        return Classifier(layers=Scaled(*six_layers()))

    plain = fitted(tmp_path, build=build)
    pipelined = fitted(tmp_path, GPipeStrategy([2, 4], chunks=4), build=build, devices=2)

    assert_same_weights(pipelined, plain)
    assert weights(plain)["layers.scale"] != 1
    layers: list[Any] = [made.lightning_module.layers for made in (plain, pipelined)]
    assert layers[1].calls == layers[0].calls > 0
