"""Averages of the weights on several GPUs: each average is where what it averages is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks as library
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn

from tests.gpu.trainers import DEPTH, needs, on_two_and_many_gpus, piped, places, plain
from tests.support.lightning_modules import FEATURES, WIDTH, Classifier, assert_same_weights, rows
from tests.support.pipes import Pipe

new_in_2_6 = pytest.mark.skipif(
    not hasattr(library, "WeightAveraging"), reason="new in Lightning 2.6"
)
Average = Callable[..., Callback]


def stochastic(**options: Any) -> Callback:
    return StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1, **options)


def moving(**options: Any) -> Callback:
    return library.EMAWeightAveraging(decay=0.8, **options)


def equal(**options: Any) -> Callback:
    # Of buffers too, torch would divide the integers of a batch norm.
    return library.WeightAveraging(use_buffers=False, **options)


on_every_average = pytest.mark.parametrize(
    "average",
    [
        stochastic,
        pytest.param(moving, marks=new_in_2_6),
        pytest.param(equal, marks=new_in_2_6),
    ],
)


class Normed(Classifier):
    """Has a batch norm in every pair of layers: in every stage."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for k in range(DEPTH):
            width = WIDTH if k else FEATURES
            layers += [nn.BatchNorm1d(width), nn.Linear(width, WIDTH), nn.Tanh()]
        super().__init__(layers=nn.Sequential(*layers))


class Looks(Callback):
    """Notes where the average and the model are; stands after the callback that averages."""

    def __init__(self) -> None:
        self.averages: list[dict[str, torch.device]] = []
        self.models: list[dict[str, torch.device]] = []
        self.before: list[set[torch.device]] = []

    def setup(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        self.before.append(set(places(average_of(trainer)).values()))

    def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.before.append(set(places(average_of(trainer)).values()))

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        self.averages.append(places(average_of(trainer)))
        self.models.append(places(pl_module))


def average_of(trainer: L.Trainer) -> nn.Module:
    average = vars(trainer.callbacks[0])["_average_model"]  # type: ignore[attr-defined]  # a connector sets it
    module: nn.Module = getattr(average, "module", average)
    return module


@on_every_average
@on_two_and_many_gpus
def test_average_is_where_its_parameter_is(tmp_path: Path, gpus: int, average: Average) -> None:
    looks = Looks()

    pipelined = piped(tmp_path, gpus, callbacks=[average(device=None), looks])

    assert len(set(looks.models[-1].values())) == gpus
    assert {torch.device("cuda", gpus - 1)} not in looks.before, "one GPU had all of the model"
    assert looks.averages == looks.models
    assert_same_weights(pipelined, plain(tmp_path, callbacks=[average(device=None)]))


@on_every_average
@on_two_and_many_gpus
def test_average_of_a_model_with_batch_norms(tmp_path: Path, gpus: int, average: Average) -> None:
    # One chunk, so that a batch norm normalises as on one device.
    options: dict[str, Any] = {"build": Normed, "max_epochs": 4}
    looks = Looks()

    pipelined = piped(tmp_path, gpus, 1, callbacks=[average(device=None), looks], **options)

    assert looks.averages == looks.models
    assert all(model == looks.models[0] for model in looks.models)
    assert_same_weights(pipelined, plain(tmp_path, callbacks=[average()], **options))


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@on_every_average
@pytest.mark.parametrize("gpus", [pytest.param(2, marks=needs(2))])
def test_average_on_a_device_that_the_user_chose(
    tmp_path: Path, gpus: int, average: Average, device: str
) -> None:
    looks = Looks()

    pipelined = piped(
        tmp_path, gpus, 1, build=Normed, callbacks=[average(device=device), looks], max_epochs=4
    )

    assert {str(each) for each in looks.averages[-1].values()} == {device}
    expected = plain(tmp_path, build=Normed, callbacks=[average(device=device)], max_epochs=4)
    assert_same_weights(pipelined, expected)


@new_in_2_6
@on_two_and_many_gpus
def test_validation_and_resume_with_the_average(tmp_path: Path, gpus: int) -> None:
    class Saves(Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.current_epoch == 1:
                trainer.save_checkpoint(tmp_path / "half.ckpt")

    looks = Looks()
    whole = plain(tmp_path, max_epochs=4, callbacks=[moving()])

    unbroken = piped(tmp_path, gpus, max_epochs=4, callbacks=[moving(), Saves()])
    resumed = piped(
        tmp_path, gpus, max_epochs=4, ckpt_path=tmp_path / "half.ckpt", callbacks=[moving(), looks]
    )

    torch.testing.assert_close(unbroken.callback_metrics, whole.callback_metrics)
    assert_same_weights(unbroken, whole)
    assert_same_weights(resumed, whole)
    assert looks.averages == looks.models
    assert {each.type for each in places(resumed.lightning_module).values()} == {"cpu"}


class Recounts(Normed):
    """Computes the statistics of its batch norms anew at the end."""

    def on_train_end(self) -> None:
        batches = self.trainer.train_dataloader
        assert batches is not None
        update_bn((x for x, _ in batches), self, self.device)


@on_two_and_many_gpus
def test_statistics_computed_anew(tmp_path: Path, gpus: int) -> None:
    pipelined = piped(tmp_path, gpus, 1, build=Recounts)

    assert_same_weights(pipelined, plain(tmp_path, Recounts))


@on_two_and_many_gpus
def test_averaged_model_of_an_engine(pipe: Pipe, gpus: int) -> None:
    torch.manual_seed(0)
    alone = Normed().get_submodule("layers").to("cuda:0")
    assert isinstance(alone, nn.Sequential)
    devices = [f"cuda:{k}" for k in range(gpus)]
    pipeline = pipe(alone, devices=devices, chunks=1)
    batches = [rows(7, seed=seed).tensors[0].to("cuda:0") for seed in range(4)]
    found: list[Any] = []

    for module in (pipeline, alone):
        average = AveragedModel(module)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for x in batches:
            optimizer.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()
            average.update_parameters(module)
        update_bn(batches, average)
        found.append(average.module)

    one, other = (dict(each.state_dict()) for each in found)
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11, check_device=False)
    assert places(found[0]) == places(pipeline)
    found[0].close()
