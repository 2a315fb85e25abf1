"""The classifier of examples/: its data, its networks, its run and its configuration.

Networks of torchvision and timm are tried where these are installed: ``make models`` does.
"""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

from examples import classify_digits
from examples.classify_digits import Classifier, DigitsData
from lightning_gpipe.commands.check import check
from tests.support.examples import fit_by_cli

# Operators this small only wait for their threads where other programs want the cores.
pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

CONFIG = Path(__file__).parents[2] / "examples/configs/classify_digits.yaml"

with_libraries = pytest.mark.skipif(
    find_spec("torchvision") is None or find_spec("timm") is None,
    reason="needs torchvision and timm: make models runs it",
)


class Small(nn.Module):
    """In the place of a library's network: an addition around a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, stride=2)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1)
        self.fc = nn.Linear(4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv1(x).relu()
        return self.fc((self.conv2(x).relu() + x).mean((2, 3)))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Networks are small, whatever their name."""
    monkeypatch.setattr(classify_digits, "network", lambda _: Small())


def test_images_are_scans_in_three_channels() -> None:
    data = DigitsData(batch_size=8, size=16)
    data.setup("fit")
    images, digits = next(iter(data.val_dataloader()))

    assert images.shape == (8, 3, 16, 16)
    assert torch.equal(images[:, 0], images[:, 2])
    assert len(data.training) + len(data.validation) == 1797
    assert set(data.validation.tensors[1].tolist()) == set(range(10))
    assert digits.shape == (8,)


def test_library_that_is_neither() -> None:
    with pytest.raises(ValueError, match="network must be torchvision/.*got 'keras/resnet'"):
        classify_digits.network("keras/resnet")


def run(tmp_path: Path, *arguments: str) -> None:
    options = ["--steps=6", "--batch-size=8", "--chunks=2", "--validation-batches=2"]
    classify_digits.main([*options, "--output", str(tmp_path), *arguments])


def test_demo_reports_what_it_shows(
    small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path)

    found = capsys.readouterr().out
    assert "val_accuracy" in found
    assert "images" in found
    assert re.search(r"Epoch 0/0 .* 6/6 ", found)
    assert (tmp_path / "version_0/metrics.csv").exists()


def test_configuration_trains_through_lightning_cli(small: None, tmp_path: Path) -> None:
    options = {
        "trainer.max_steps": 2,
        "trainer.limit_val_batches": 1,
        "trainer.enable_progress_bar": False,
    }

    assert fit_by_cli(CONFIG, tmp_path, options).global_step == 2


def test_configuration_is_checked(small: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert check([f"--config={CONFIG}"]) == 0
    assert re.search(r"stage 1: network.*fc, \d+ parameters", capsys.readouterr().out)


@with_libraries
@pytest.mark.parametrize("name", ["torchvision/resnet18", "timm/test_resnet"])
def test_networks_of_libraries(name: str, tmp_path: Path) -> None:
    run(tmp_path, "--network", name)

    assert "network." in next(iter(Classifier(name).state_dict()))
