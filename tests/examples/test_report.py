"""What the examples share: their options, their measurements and their report."""

import logging
from argparse import Namespace
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from examples.report import Measurements, options_parser, report, start, trainer_arguments
from lightning_gpipe import GPipeStrategy


class Classifier(L.LightningModule):
    """Its validation loss, `shift` more in a plain Trainer, is what `report` looks at."""

    shift = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1))
        self.validated_in: list[type] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        plain = not isinstance(self.trainer.strategy, GPipeStrategy)
        self.validated_in.append(type(self.trainer.strategy))
        self.log("val_loss", self.layers(batch).square().mean() + self.shift * plain)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class Points(L.LightningDataModule):
    """Five batches of four rows."""

    def train_dataloader(self) -> DataLoader[Tensor]:
        points = torch.randn(20, 2, generator=torch.Generator().manual_seed(0))
        return DataLoader(points, 4)  # type: ignore[arg-type]  # a tensor is enough

    val_dataloader = train_dataloader


def options(output: Path, *arguments: str) -> Namespace:
    parser = options_parser("A test.", output=output, balance=[1, 1], chunks=2)
    return start(parser, [*arguments])


@pytest.fixture
def classifier() -> Classifier:
    torch.manual_seed(0)
    return Classifier()


def fit(
    chosen: Namespace, model: Classifier, measurements: Measurements
) -> tuple[L.Trainer, ModelCheckpoint]:
    strategy = GPipeStrategy(chosen.balance, chosen.chunks, activation_checkpointing="never")
    best = ModelCheckpoint(filename="best", monitor="val_loss")
    trainer = L.Trainer(
        strategy="auto" if chosen.plain else strategy,
        max_epochs=1,
        callbacks=[best, measurements],
        **trainer_arguments(chosen),
    )
    trainer.fit(model, Points())
    return trainer, best


# The options


def test_balance_is_a_list_or_a_word(tmp_path: Path):
    assert options(tmp_path, "--balance=3,2,1").balance == [3, 2, 1]
    assert options(tmp_path, "--balance=parameters").balance == "parameters"


def test_defaults_of_an_example(tmp_path: Path):
    chosen = options(tmp_path)

    assert (chosen.balance, chosen.chunks, chosen.devices) == ([1, 1], 2, 2)


def test_plain_run_has_one_device(tmp_path: Path):
    assert trainer_arguments(options(tmp_path, "--devices=4"))["devices"] == 4
    assert trainer_arguments(options(tmp_path, "--devices=4", "--plain"))["devices"] == 1


def test_same_seed_draws_the_same(tmp_path: Path):
    drawn = []
    for seed in 1, 1, 2:
        options(tmp_path, f"--seed={seed}")
        drawn.append(torch.rand(3).tolist())

    assert drawn[0] == drawn[1] != drawn[2]


def test_tips_are_hidden_and_warnings_shown(tmp_path: Path):
    options(tmp_path)
    log = logging.getLogger("lightning.pytorch.utilities.rank_zero")

    assert not log.isEnabledFor(logging.INFO)
    assert log.isEnabledFor(logging.WARNING)


# The measurements


def test_measurements_of_a_pipeline(
    classifier: Classifier, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    measurements = Measurements(steps=3)

    fit(options(tmp_path), classifier, measurements)

    stages = capsys.readouterr().out
    cost = measurements.cost("rows", 4)
    assert stages.count("Linear") == 2
    assert len(measurements.seconds) == len(measurements.timelines) == 3  # of five steps
    assert list(cost) == ["rows per second", "bubble, measured", "bubble, by the schedule"]
    assert cost["bubble, by the schedule"] == "33.3%"  # 1 / (2 + 2 - 1)


def test_measurements_of_a_plain_run(
    classifier: Classifier, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    measurements = Measurements()

    fit(options(tmp_path, "--plain"), classifier, measurements)

    assert "stage" not in capsys.readouterr().out
    assert len(measurements.seconds) == 5
    assert list(measurements.cost("rows", 4)) == ["rows per second"]


def test_rate_is_that_of_the_median_step():
    measurements = Measurements()
    measurements.seconds.extend([0.5, 0.001, 100.0])

    assert measurements.cost("rows", 1000) == {"rows per second": "2,000"}


# The report


def test_report_validates_in_the_pipeline_and_plain(
    classifier: Classifier, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    trainer, best = fit(options(tmp_path), classifier, Measurements())
    classifier.validated_in.clear()

    reloaded = report(trainer, classifier, Points(), best, {"val_loss": 2.5}, {"cost": "much"})

    printed = capsys.readouterr().out
    assert reloaded is not classifier
    assert set(classifier.validated_in) == {GPipeStrategy}
    assert not {GPipeStrategy} & set(reloaded.validated_in)
    assert printed.count(f"{best.best_model_score:.4f}") == 2
    for each in "2.5000", "much", "difference of val_loss":
        assert each in printed
    assert (tmp_path / "version_0/metrics.csv").exists()
    assert list(tmp_path.glob("version_0/events.out.tfevents.*"))


def test_checkpoint_with_another_loss_is_an_error(
    classifier: Classifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    trainer, best = fit(options(tmp_path), classifier, Measurements())
    monkeypatch.setattr(Classifier, "shift", 0.1)

    with pytest.raises(SystemExit, match="must have the same validation loss in a plain Trainer"):
        report(trainer, classifier, Points(), best, {}, {})


def test_loss_that_differs_by_rounding_is_none(
    classifier: Classifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    trainer, best = fit(options(tmp_path), classifier, Measurements())
    assert best.best_model_score is not None
    monkeypatch.setattr(Classifier, "shift", 1e-5 * best.best_model_score.item())

    report(trainer, classifier, Points(), best, {}, {})
