"""Reported: verify=True also runs the first batch without the pipeline."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import spectral_norm
from torch.nn.utils.parametrizations import spectral_norm as parametrized

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.commands.fit import main
from lightning_gpipe.core.pipeline import PipedModule
from lightning_gpipe.core.programs import Program
from lightning_gpipe.core.verify.parity import Parity
from lightning_gpipe.core.verify.verification import verify_run
from tests.support.lightning_modules import (
    FEATURES,
    WIDTH,
    Classifier,
    Data,
    fitted,
    trainer,
    weights,
)
from tests.support.models import Centred

# What it is for.


def classifier(*within: nn.Module) -> Classifier:
    """With these layers between two others."""
    first, last = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, WIDTH)
    return Classifier(layers=nn.Sequential(first, *within, last))


def strategy(**options: Any) -> GPipeStrategy:
    return GPipeStrategy(chunks=3, **({"verify": True} | options))


def verdicts(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if message.startswith("verified")]


def test_good_model_is_reported_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fitted(tmp_path, strategy(), devices=2)

    (message,) = verdicts(caplog)
    assert message.startswith("verified: a plain run and one in 3 micro-batches agree.")
    assert "\n" not in message


def test_fault_ends_the_fit_before_the_first_step(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = classifier(nn.Tanh(), Centred())
    before = {name: value.clone() for name, value in model.state_dict().items()}

    with pytest.raises(RuntimeError, match=r"the output of layer 2 \('2', Centred, stage 1, cpu\)"):
        trainer(tmp_path, strategy(), devices=2).fit(model, datamodule=Data())

    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert "forward" not in vars(model.layers)


def test_known_reason_is_a_warning_and_training_goes_on(tmp_path: Path) -> None:
    def build() -> Classifier:
        return classifier(nn.BatchNorm1d(WIDTH), nn.Tanh())

    with pytest.warns(UserWarning, match="layer 1 has a BatchNorm1d") as caught:
        one = fitted(tmp_path, strategy(), build=build, devices=2)

    assert sum("BatchNorm1d" in str(warning.message) for warning in caught) == 1
    other = fitted(tmp_path, strategy(verify=False), build=build, devices=2)
    torch.testing.assert_close(weights(one), weights(other), rtol=0, atol=0)


def test_autocast_of_the_trainer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def build() -> Classifier:
        return Classifier().float()

    fitted(tmp_path, strategy(), build=build, devices=2, max_steps=1, precision="bf16-mixed")

    (message,) = verdicts(caplog)
    assert message.endswith("allowed: 5.0e-02")


# Nothing else changes.


class Drops(Classifier):
    """With dropout, and a list of its losses."""

    def __init__(self) -> None:
        super().__init__(
            layers=nn.Sequential(
                nn.Linear(FEATURES, WIDTH),
                nn.Dropout(inplace=True),
                nn.Tanh(),
                nn.Linear(WIDTH, WIDTH),
                nn.Dropout(),
            )
        )
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.item())
        return loss


@pytest.mark.parametrize("way", [True, "sample"])
@pytest.mark.parametrize("balance", [[5], [2, 3]])
def test_training_is_the_same_to_the_bit(tmp_path: Path, balance: list[int], way: Any) -> None:
    def run(verify: Any) -> tuple[L.Trainer, list[float]]:
        made = fitted(
            tmp_path,
            strategy(balance=balance, verify=verify),
            build=Drops,
            devices=len(balance),
            shuffle=True,
            accumulate_grad_batches=2,
        )
        assert isinstance(made.lightning_module, Drops)
        return made, made.lightning_module.losses

    (one, losses), (other, expected) = run(way), run(False)

    torch.testing.assert_close(weights(one), weights(other), rtol=0, atol=0)
    assert losses == expected
    assert len(losses) == 9, "3 epochs of 3 batches, each run once"
    assert one.callback_metrics == other.callback_metrics


@pytest.fixture
def verifications(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of rows that were verified."""
    rows: list[int] = []

    def counted(taken: PipedModule, program: Program, values: Sequence[Any]) -> Parity:
        rows.append(values[0].size(0))
        return verify_run(taken, program, values)

    monkeypatch.setattr("lightning_gpipe.core.verify.verification.verify_run", counted)
    return rows


def test_first_training_batch_only(tmp_path: Path, verifications: list[int]) -> None:
    fitted(tmp_path, strategy(), devices=2, num_sanity_val_steps=2)

    assert verifications == [7], "not the 5 rows of a validation batch"


def test_evaluation_is_not_verified(tmp_path: Path, verifications: list[int]) -> None:
    made = trainer(tmp_path, strategy(), devices=2)
    made.validate(Classifier(), datamodule=Data(), verbose=False)
    made.predict(Classifier(), datamodule=Data())

    assert not verifications


def test_every_fit_is_verified(tmp_path: Path, verifications: list[int]) -> None:
    model, made = Classifier(), trainer(tmp_path, strategy(), devices=2, max_epochs=1)

    made.fit(model, datamodule=Data())
    made.fit_loop.max_epochs = 2
    made.fit(model, datamodule=Data())

    assert len(verifications) == 2


def test_whole_batch_is_verified_only_if_asked_for(
    tmp_path: Path, verifications: list[int]
) -> None:
    fitted(tmp_path, GPipeStrategy(), devices=2, max_steps=1)

    assert not verifications


@pytest.mark.parametrize("layer", [spectral_norm, parametrized])
def test_spectral_norm_is_a_known_reason(tmp_path: Path, layer: Callable[..., nn.Module]) -> None:
    build = partial(classifier, layer(nn.Linear(WIDTH, WIDTH)))
    with pytest.warns(UserWarning, match="whose power iteration advances with each micro-batch"):
        fitted(tmp_path, strategy(), build=build, devices=2, max_steps=1)


@pytest.mark.usefixtures("lightning_cli")
def test_configuration(tmp_path: Path, verifications: list[int]) -> None:
    config = {
        "seed_everything": False,
        "trainer": {
            "accelerator": "cpu",
            "devices": 2,
            "strategy": {
                "class_path": "lightning_gpipe.GPipeStrategy",
                "init_args": {"verify": True},
            },
            "fast_dev_run": True,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": str(tmp_path),
        },
        "model": {"class_path": "tests.support.lightning_modules.Classifier"},
        "data": {"class_path": "tests.support.lightning_modules.Data"},
    }
    (tmp_path / "train.yaml").write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML

    main(["fit", "--config", str(tmp_path / "train.yaml")])

    assert verifications == [7]
