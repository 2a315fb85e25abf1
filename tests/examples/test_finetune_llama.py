"""The Llama of examples/: its tokenizer, its runs, its adapters and its configuration."""

import csv
import math
import re
from pathlib import Path

import pytest
import torch

from examples import finetune_llama
from examples.char_lm import TEXT
from examples.finetune_llama import SIZES, Llama, trained_tokenizer
from tests.support.examples import fit_by_cli

CONFIG = Path(__file__).parents[2] / "examples/configs/finetune_llama.yaml"


@pytest.fixture(autouse=True)
def _short_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finetune_llama, "TEXT", TEXT[: len(TEXT) // 8])


def run(folder: Path, *arguments: str) -> float:
    """Train for a few steps and return the validation loss that was logged last."""
    few = "--size=tiny", "--steps=6", "--batch-size=8", "--context=24", "--validation-batches=2"
    finetune_llama.main([*few, "--chunks=3", f"--output={folder}", *arguments])
    rows = csv.DictReader((folder / "version_0/metrics.csv").read_text("utf-8").splitlines())
    return [float(row["val_loss"]) for row in rows if row["val_loss"]][-1]


def test_tokenizer_gives_the_text_back() -> None:
    text = TEXT[:2000]

    tokenizer = trained_tokenizer(text, 300)

    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert len(tokenizer) == 300 > max(tokens)
    assert len(tokens) < len(text)


def test_pipeline_learns_what_a_plain_run_learns(tmp_path: Path) -> None:
    plain = run(tmp_path / "plain", "--plain")
    pipelined = run(tmp_path / "pipelined")

    assert pipelined == pytest.approx(plain, rel=1e-4)
    assert pipelined < math.log(SIZES["tiny"]["vocabulary"]) - 0.3  # which knows nothing


def test_run_from_the_weights_of_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = run(tmp_path / "first")
    report = capsys.readouterr().out
    folder = tmp_path / "first/version_0/llama"

    second = run(tmp_path / "second", f"--pretrained={folder}")

    for line in (
        r"Epoch 0/0 .* 6/6 ",
        rf"│ val_loss +│ \d\.\d{{4}} +│ {first:.4f} +│ {first:.4f} +│",
        r"│ tokens per second +│ [\d,]+ +│",
        r"\n\nThe ",
        rf"Weights and tokenizer: {re.escape(str(folder))}",
    ):
        assert re.search(line, report)
    assert second < first - 0.1


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_learn_what_they_learn_in_a_plain_run(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="needs peft: pip install peft")
    torch.manual_seed(0)
    model = Llama(**SIZES["tiny"], lora=2)
    model.configure_model()
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 2 * 7, "two for each linear layer of both blocks"
    assert all("lora" in name for name in trained)

    plain = run(tmp_path / "plain", "--plain", "--lora=2")
    pipelined = run(tmp_path / "pipelined", "--lora=2")

    assert pipelined == pytest.approx(plain, rel=1e-4)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_on_the_weights_of_another(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="needs peft: pip install peft")
    first = run(tmp_path / "first")
    given = f"--pretrained={tmp_path / 'first/version_0/llama'}", "--lora=2"

    plain = run(tmp_path / "plain", "--plain", *given)
    pipelined = run(tmp_path / "pipelined", *given)

    # Not the same: the plain model draws weights before its adapters, one on meta does not.
    assert pipelined == pytest.approx(plain, rel=2e-3)
    assert max(plain, pipelined) < first


def test_configuration_trains_through_lightning_cli(tmp_path: Path) -> None:
    options = {
        "trainer.limit_train_batches": 6,
        "trainer.val_check_interval": 6,
        "trainer.limit_val_batches": 2,
        "model.init_args.vocabulary": 300,
        "model.init_args.width": 32,
        "data.init_args.vocabulary": 300,
    }

    trainer = fit_by_cli(CONFIG, tmp_path, options)

    assert trainer.global_step == 6
    assert trainer.callback_metrics["val_loss"] < math.log(300) - 0.3
