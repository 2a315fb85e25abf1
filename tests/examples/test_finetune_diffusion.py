"""The U-Net of examples/: its photographs, its runs, its adapters and its configuration."""

import csv
import re
import warnings
from pathlib import Path

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for _library in ("diffusers", "skimage"):
        pytest.importorskip(_library, reason="needs diffusers and scikit-image: make models")
    from examples import finetune_diffusion
    from examples.finetune_diffusion import LETTERS, TOKENS, Diffusion, Photographs, prompt

from lightning_gpipe.commands.check import check
from tests.support.examples import fit_by_cli

# Operators this small only wait for their threads where other programs want the cores.
pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

CONFIG = Path(__file__).parents[2] / "examples/configs/finetune_diffusion.yaml"


def run(folder: Path, *arguments: str) -> list[float]:
    """Train for a few steps and return the losses of training and validation that were logged."""
    few = "--size=16", "--width=8", "--steps=20", "--batch-size=8", "--chunks=3"
    finetune_diffusion.main([*few, f"--output={folder}", *arguments])
    rows = csv.DictReader((folder / "version_0/metrics.csv").read_text("utf-8").splitlines())
    return [float(row[k]) for row in rows for k in ("train_loss", "val_loss") if row[k]]


def test_photographs_in_two_parts() -> None:
    data = Photographs(["brick", "astronaut"], batch_size=4, size=16, steps=3)
    data.setup("fit")

    images, prompts = next(iter(data.train_dataloader()))

    assert images.shape == (4, 1, 16, 16)
    assert images.min() >= -1 and images.max() <= 1
    assert prompts.shape == (4, TOKENS, LETTERS)
    assert len(data.training) == 12
    assert len(data.validation) == 8


def test_prompt_is_the_letters_of_a_name() -> None:
    letters = prompt("ab").argmax(1).tolist()

    assert letters == [1, 2, *[0] * (TOKENS - 2)]


def test_pipeline_learns_what_a_plain_run_learns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = run(tmp_path / "plain", "--plain")
    capsys.readouterr()
    pipelined = run(tmp_path / "pipelined")

    assert pipelined == pytest.approx(plain, rel=1e-4)
    assert pipelined[-1] < 1.0  # of no noise at all
    assert re.search(r"network\.up.* CrossAttnUp", capsys.readouterr().out)
    assert (tmp_path / "pipelined/version_0/samples.png").exists()


def test_adapters_learn_what_they_learn_in_a_plain_run(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="needs peft: pip install peft")
    run(tmp_path / "first")
    given = f"--pretrained={tmp_path / 'first/version_0/unet'}", "--lora=2", "--photographs=moon"

    plain = run(tmp_path / "plain", "--plain", *given)
    pipelined = run(tmp_path / "pipelined", *given)

    assert pipelined == pytest.approx(plain, rel=1e-4)
    assert (tmp_path / "pipelined/version_0/adapters").is_dir()


def test_only_adapters_are_trained() -> None:
    pytest.importorskip("peft", reason="needs peft: pip install peft")
    model = Diffusion(size=16, width=8, lora=2)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]

    assert trained
    assert all("lora" in name for name in trained)
    assert any("down_blocks" in name for name in trained)
    assert any("up_blocks" in name for name in trained)


def test_samples_of_an_untrained_network() -> None:
    torch.manual_seed(0)

    images = Diffusion(size=16, width=8).draw(["brick", "grass"], 16, steps=2)

    assert images.shape == (2, 1, 16, 16)
    assert images.abs().max() <= 1


def test_configuration_trains_through_lightning_cli(tmp_path: Path) -> None:
    options = {
        "trainer.max_steps": 2,
        "trainer.limit_val_batches": 1,
        "trainer.enable_progress_bar": False,
        "model.init_args.width": 8,
        "data.init_args.steps": 2,
    }

    assert fit_by_cli(CONFIG, tmp_path, options).global_step == 2


def test_configuration_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert check([f"--config={CONFIG}"]) == 0
    assert "network.up_blocks" in capsys.readouterr().out
