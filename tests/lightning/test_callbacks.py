"""Unchanged model: Lightning's callbacks and tuner see the same model as on one device.

Here are also the tests of ``averages``.
"""

from __future__ import annotations

import copy
import io
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks as library
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelSummary,
    StochasticWeightAveraging,
)
from lightning.pytorch.tuner.tuning import Tuner
from lightning.pytorch.utilities.model_summary.model_summary import summarize
from torch import nn

from lightning_gpipe import GPipeStrategy
from tests.support.lightning_modules import (
    FEATURES,
    WIDTH,
    Classifier,
    Data,
    assert_same_weights,
    fitted,
    rows,
    trainer,
    weights,
)
from tests.support.process import workers


def strategy() -> GPipeStrategy:
    return GPipeStrategy([2, 4], chunks=3)


def test_early_stopping_in_the_same_epoch(tmp_path: Path) -> None:
    def run(*args: Any, **options: Any) -> L.Trainer:
        stop = EarlyStopping("val_loss", patience=1, min_delta=0.02)
        return fitted(tmp_path, *args, max_epochs=30, callbacks=[stop], **options)

    plain = run()
    pipelined = run(strategy(), devices=2)

    assert 2 < plain.current_epoch < 30
    assert pipelined.current_epoch == plain.current_epoch
    assert_same_weights(pipelined, plain)


def test_gradient_accumulation_scheduler(tmp_path: Path) -> None:
    def run(*args: Any, **options: Any) -> L.Trainer:
        scheduler = GradientAccumulationScheduler({0: 1, 1: 3})
        return fitted(tmp_path, *args, callbacks=[scheduler], **options)

    plain = run()
    pipelined = run(strategy(), devices=2)

    assert pipelined.global_step == plain.global_step == 3 + 1 + 1
    assert_same_weights(pipelined, plain)


def stochastic(**options: Any) -> Callback:
    return StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1, **options)


def moving(**options: Any) -> Callback:
    return library.EMAWeightAveraging(decay=0.8, **options)


on_every_average = pytest.mark.parametrize(
    "average",
    [
        stochastic,
        pytest.param(
            moving,
            marks=pytest.mark.skipif(
                not hasattr(library, "EMAWeightAveraging"), reason="new in Lightning 2.6"
            ),
        ),
    ],
)


class Normed(Classifier):
    """Has batch norms in both stages."""

    def __init__(self) -> None:
        first, second = nn.BatchNorm1d(FEATURES), nn.BatchNorm1d(WIDTH)
        linear = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, WIDTH)
        super().__init__(layers=nn.Sequential(first, linear[0], second, linear[1], nn.Tanh()))


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("build", [Classifier, Normed])
@on_every_average
def test_average_of_the_weights(
    tmp_path: Path, average: Any, build: type[Classifier], device: str | None
) -> None:
    # One chunk, so that a batch norm normalises as on one device.
    def run(*args: Any, **options: Any) -> L.Trainer:
        own = average(device=device)
        return fitted(tmp_path, *args, max_epochs=4, build=build, callbacks=[own], **options)

    balance = [2, len(build().layers) - 2]

    pipelined = run(GPipeStrategy(balance, chunks=1), devices=2)

    plain = run()
    assert_same_weights(pipelined, plain)
    torch.testing.assert_close(pipelined.callback_metrics, plain.callback_metrics)


@on_every_average
def test_average_in_a_plain_trainer_after_a_pipeline(tmp_path: Path, average: Any) -> None:
    def run(*args: Any, **options: Any) -> L.Trainer:
        own = average(device=None)
        fitted(tmp_path, *args, callbacks=[own], **options)
        assert vars(own)["_device"] is None, "the callback is not as the user made it"
        return fitted(tmp_path, callbacks=[own])

    assert_same_weights(run(strategy(), devices=2), run())


@on_every_average
def test_average_of_a_model_without_memory(tmp_path: Path, average: Any) -> None:
    made = trainer(tmp_path, strategy(), devices=2, callbacks=[average()])
    with made.init_module(empty_init=True):
        model = Classifier()

    with pytest.raises(ValueError, match="WeightAveraging copies the model.*must have memory"):
        made.fit(model, datamodule=Data())


class Example(Classifier):
    """Has an input for the summary."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = rows(5, seed=3).tensors[0]


def test_summary_with_example_input(tmp_path: Path) -> None:
    class Summaries(ModelSummary):
        @staticmethod
        def summarize(summary_data: Any, *_: Any, **__: Any) -> None:
            summaries.append({name: list(column) for name, column in summary_data})

    summaries: list[dict[str, list[Any]]] = []
    run = partial(fitted, tmp_path, build=Example, max_steps=1)

    run(callbacks=[Summaries()])
    run(strategy(), devices=2, callbacks=[Summaries()])

    plain, pipelined = summaries
    assert pipelined == plain
    assert [params.strip() for params in pipelined["Params"]] == ["200", "27", "0"]


def test_summary_outside_a_fit() -> None:
    assert summarize(Example()).total_parameters == 200 + 27


class Copies(Callback):
    """Copies the model in the middle of the fit."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 4:
            assert "forward" in pl_module.layers.__dict__, "the model is not in a pipeline"
            self.copy = copy.deepcopy(pl_module)
            self.weights = {name: value.clone() for name, value in pl_module.state_dict().items()}


@pytest.fixture
def copies() -> Copies:
    return Copies()


def test_copy_made_during_a_fit(tmp_path: Path, copies: Copies) -> None:
    pipelined = fitted(tmp_path, strategy(), devices=2, callbacks=[copies])

    assert_same_weights(pipelined, fitted(tmp_path))
    x, reference = rows(5, seed=3).tensors[0], Classifier()
    reference.load_state_dict(copies.weights)
    assert type(copies.copy.layers) is nn.Sequential
    torch.testing.assert_close(copies.copy(x), reference(x))
    assert workers() == [], "a copy has no pipeline of its own"


def test_copy_shares_nothing_with_its_original(tmp_path: Path, copies: Copies) -> None:
    pipelined = fitted(tmp_path, strategy(), devices=2, callbacks=[copies])
    original = {name: value.clone() for name, value in weights(pipelined).items()}
    copies.copy._metric_attributes = (
        None  # Lightning caches the metrics' ids, those of the original
    )

    trainer(tmp_path, strategy(), devices=2, max_epochs=1).fit(copies.copy, datamodule=Data())

    torch.testing.assert_close(weights(pipelined), original, rtol=0, atol=0)
    assert not torch.equal(copies.copy.head.weight, copies.weights["head.weight"])


def test_learning_rate_finder(tmp_path: Path) -> None:
    def find(*args: Any, **options: Any) -> list[float]:
        torch.manual_seed(0)
        made = trainer(tmp_path, *args, max_epochs=9, **options)
        finder = Tuner(made).lr_find(
            Tunable(),
            datamodule=Data(),
            num_training=12,
            early_stop_threshold=None,
            update_attr=False,
        )
        assert finder is not None
        return finder.results["loss"]

    losses = find(strategy(), devices=2)

    assert len(losses) == 12
    assert losses == pytest.approx(find(), rel=1e-6)


class Tunable(Classifier):
    """Has the learning rate that the tuner looks for."""

    lr = 0.1

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Sized(Data):
    """Has the batch size that the tuner looks for."""

    batch_size = 2

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(rows(20, seed=1), batch_size=self.batch_size)


def test_batch_size_finder(tmp_path: Path) -> None:
    def find(model: L.LightningModule, *args: Any, **options: Any) -> tuple[L.Trainer, int | None]:
        made = trainer(tmp_path, *args, **options)
        size = Tuner(made).scale_batch_size(
            model, datamodule=Sized(), max_trials=3, steps_per_trial=2, init_val=2
        )
        return made, size

    torch.manual_seed(0)
    model = Classifier()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    pipelined, size = find(model, strategy(), devices=2)

    assert size is not None
    assert size == find(Classifier())[1]
    torch.testing.assert_close(dict(model.state_dict()), before)
    pipelined.fit(model, datamodule=Data())
    assert_same_weights(pipelined, fitted(tmp_path))


class Pickles(Callback):
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 4:
            file = io.BytesIO()
            torch.save(trainer.model, file)
            file.seek(0)
            self.copy = torch.load(file, weights_only=False)
            self.weights = {name: value.clone() for name, value in pl_module.state_dict().items()}


def test_pickle_made_during_a_fit(tmp_path: Path) -> None:
    pickles = Pickles()
    fitted(tmp_path, GPipeStrategy([2, 4], 3), devices=2, callbacks=[pickles])
    x, reference = rows(5, seed=3).tensors[0], Classifier()
    reference.load_state_dict(pickles.weights)

    torch.testing.assert_close(pickles.copy(x), reference(x))
    assert workers() == []
