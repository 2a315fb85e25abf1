"""Pipelines in the models of Lightning's own tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from torch import Tensor, nn

from tests.published.injection import InjectedStrategy, Runs, StagedLinear, injected
from tests.support.lightning_modules import Classifier, Data, trainer


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Counts the pipelines of Trainers that name no strategy."""
    counted = Runs()
    chosen = injected(_AcceleratorConnector._choose_strategy, counted)
    monkeypatch.setattr(_AcceleratorConnector, "_choose_strategy", chosen)
    return counted


class NoLayer(L.LightningModule):
    """A model without a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        return (self.weight * batch[0].mean()).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_boring_model_is_piped_and_stays_as_it_is(tmp_path: Path, runs: Runs) -> None:
    class Looks(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
            seen.add((type(pl_module.layer), *pl_module.state_dict()))

    seen: set[tuple[Any, ...]] = set()
    model = BoringModel()
    made = trainer(tmp_path, max_steps=3, limit_val_batches=0, callbacks=[Looks()])

    made.fit(model)

    assert isinstance(made.strategy, InjectedStrategy)
    assert seen == {(StagedLinear, "layer.weight", "layer.bias")}
    assert type(model.layer) is nn.Linear
    assert list(model.layer.children()) == []
    assert str(runs) == (
        "GPipeStrategy was set up 1 times: 1 times a pipeline of two stages ran, on 3 "
        "mini-batches in all"
    )


def test_sequential_is_piped_itself(tmp_path: Path, runs: Runs) -> None:
    trainer(tmp_path, max_steps=1).fit(Classifier(), datamodule=Data())

    assert (runs.setups, runs.piped) == (1, 1)


@pytest.mark.filterwarnings("ignore:training_step did not run the pipeline")
def test_model_with_nothing_to_pipe_is_counted(tmp_path: Path, runs: Runs) -> None:
    model = NoLayer()

    trainer(tmp_path, max_steps=1).fit(model, torch.ones(4, 1).split(1))

    assert runs == Runs(setups=1, piped=0, batches=0)
    assert list(model.children()) == []


@pytest.mark.parametrize(
    "options", [{"strategy": SingleDeviceStrategy("cpu")}, {"strategy": "ddp"}, {"devices": 2}]
)
def test_trainers_that_name_a_strategy_or_devices(
    tmp_path: Path, runs: Runs, options: dict[str, Any]
) -> None:
    made = trainer(tmp_path, **options)

    assert not isinstance(made.strategy, InjectedStrategy)
