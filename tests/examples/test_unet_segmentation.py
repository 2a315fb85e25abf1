"""The U-Net of examples/: its canvases, its model, its run and its configuration."""

import csv
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from examples import unet_segmentation
from examples.unet_segmentation import (
    BACKGROUND,
    INK,
    Canvases,
    DigitsData,
    UNet,
    u_net,
)
from lightning_gpipe.core.skip.skip_layout import verify_skippables
from tests.support.examples import fit_by_cli
from tests.support.pipes import Pipe

# Operators this small only wait for their threads where other programs want the cores.
pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

CONFIG = Path(__file__).parents[2] / "examples/configs/unet_segmentation.yaml"


@pytest.fixture(scope="module")
def data() -> DigitsData:
    digits = DigitsData(canvases=64, batch_size=8)
    digits.setup("fit")
    return digits


@pytest.fixture
def model() -> UNet:
    torch.manual_seed(0)
    return UNet(width=4, levels=3).double()


# The canvases


def drawn(canvases: Canvases) -> list[tuple[Tensor, Tensor]]:
    return [canvases[i] for i in range(len(canvases))]


def test_no_scan_is_in_both_sets(data: DigitsData):
    training, validation = (
        {tuple(scan.flatten().tolist()) for scan in each.scans}
        for each in (data.training, data.validation)
    )

    assert not training & validation
    assert len(training) == 1437
    assert len(validation) == 360


def test_both_sets_have_all_digits(data: DigitsData):
    for canvases in data.training, data.validation:
        assert canvases.digits.bincount().min() > 30


def test_classes_are_those_of_the_pixels(data: DigitsData):
    canvases = Canvases(data.training.scans, data.training.digits, range(20), noise=0.0)

    for image, classes in drawn(canvases):
        assert image.shape == (1, 48, 48)
        assert torch.equal(image[0] > INK, classes != BACKGROUND)


def test_classes_are_those_of_the_scans():
    half_and_full_ink = torch.ones(2, 8, 8) * torch.tensor([0.5, 1.0])[:, None, None]
    canvases = Canvases(half_and_full_ink, torch.tensor([3, 7]), range(5), noise=0.0)

    for image, classes in drawn(canvases):
        assert torch.equal((image[0] * 2).round(), 1.0 * (classes == 3) + 2.0 * (classes == 7))


def test_same_number_is_the_same_canvas(data: DigitsData):
    for i in 3, 31:
        torch.testing.assert_close(data.training[i], data.training[i], rtol=0, atol=0)
        assert not torch.equal(data.training[i][0], data.training[i + 1][0])
    assert not set(data.training.numbers) & set(data.validation.numbers)


def test_canvases_have_several_digits(data: DigitsData):
    found = [len(classes.unique()) - 1 for _, classes in drawn(data.training)]

    assert min(found) >= 1
    assert sum(found) / len(found) > 3


# The model


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_layers_keep_the_resolution(levels: int):
    layers = u_net(4, levels)

    verify_skippables(layers)

    assert len(layers) == 6 * levels + 3
    assert layers(torch.randn(2, 1, 16, 24)).shape == (2, 11, 16, 24)


@pytest.mark.parametrize("balance", [[11, 10], [13, 8], [3, 3, 3, 3, 3, 3, 3]], ids=str)
def test_pipeline_gives_what_the_plain_model_gives(model: UNet, balance: list[int], pipe: Pipe):
    images = torch.randn(8, 1, 16, 16, dtype=torch.float64)
    model.train().layers(images)  # running statistics that are not the initial ones
    expected, expected_gradients = scores_and_gradients(model.eval(), images)

    model.layers = pipe(model.layers, balance, chunks=4)  # type: ignore[assignment]  # as GPipeStrategy does
    pipelined, gradients = scores_and_gradients(model, images)

    torch.testing.assert_close(pipelined, expected)
    torch.testing.assert_close(gradients, expected_gradients)


def scores_and_gradients(model: UNet, images: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
    scores = model.layers(images)
    return scores, torch.autograd.grad(scores.square().sum(), list(model.layers.parameters()))


# The run


def run(output: Path, *arguments: str) -> dict[str, float]:
    """Train for a few steps and return the last value of each metric that was logged."""
    small = "--steps=3", "--width=4", "--canvas=24", "--batch-size=16", "--validation-batches=1"
    unet_segmentation.main([*small, f"--output={output}", *arguments])
    rows = csv.DictReader((output / "version_0/metrics.csv").read_text("utf-8").splitlines())
    return {name: float(value) for row in rows for name, value in row.items() if value}


def test_demo_reports_what_it_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    metrics = run(tmp_path)

    report = capsys.readouterr().out
    iou = f"{metrics['val_mean_iou']:.4f}"
    for line in (
        r"Shrink",
        r"Enlarge",
        r"skips to",
        rf"│ val_mean_iou +│ 0\.0\d{{3}} +│ {iou} +│ {iou} +│",
        r"│ images per second +│ [\d,]+ +│",
        r"│ bubble, by the schedule +│ 11\.1% +│",  # 1 / (8 + 2 - 1)
    ):
        assert re.search(line, report)


def test_pipeline_learns_what_a_plain_run_learns(tmp_path: Path):
    plain = run(tmp_path / "plain", "--plain")
    pipelined = run(
        tmp_path / "pipelined", "--chunks=1"
    )  # batch norms see the whole batch, as in plain

    assert pipelined["val_mean_iou"] == pytest.approx(plain["val_mean_iou"], abs=0.01)
    assert pipelined["val_loss"] == pytest.approx(plain["val_loss"], rel=0.01)


# The configuration


def test_configuration_trains_through_lightning_cli(tmp_path: Path):
    options = {
        "trainer.limit_train_batches": 2,
        "trainer.limit_val_batches": 1,
        "trainer.val_check_interval": 2,
    }

    trainer = fit_by_cli(CONFIG, tmp_path, options)

    assert trainer.global_step == 2
    assert "val_mean_iou" in trainer.callback_metrics
