"""The examples on several GPUs, as their command lines run them."""

from __future__ import annotations

import csv
import math
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from examples import char_lm, finetune_llama, seq_classifier, unet_segmentation
from tests.gpu.trainers import MANY, needs

pytestmark = [*needs(2), pytest.mark.usefixtures("level_of_lightnings_log")]
Main = Callable[[Sequence[str]], None]

SMALL = ["--steps=4", "--batch-size=12", "--chunks=4", "--validation-batches=2"]
PIPED = ["--accelerator=gpu", f"--devices={MANY}", "--balance=parameters"]


@pytest.fixture
def few_docstrings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one package, as all take seconds to read; its modules are the classes."""
    package = Path(sysconfig.get_path("stdlib")) / "asyncio"
    with monkeypatch.context() as patch:
        patch.setattr("sysconfig.get_path", lambda _: package)
        few = seq_classifier.docstrings.__wrapped__()
    monkeypatch.setattr(seq_classifier, "docstrings", lambda: few)


def losses(main: Main, output: Path, *arguments: str) -> list[float]:
    """The losses that an example logged, of training and of validation."""
    main([*SMALL, f"--output={output}", *arguments])
    rows = csv.DictReader((output / "version_0/metrics.csv").read_text("utf-8").splitlines())
    return [float(value) for row in rows for name, value in row.items() if "loss" in name and value]


@pytest.fixture
def short_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which a tokenizer is trained in no time."""
    monkeypatch.setattr(finetune_llama, "TEXT", char_lm.TEXT[:50_000])


@pytest.mark.usefixtures("few_docstrings", "short_text")
@pytest.mark.parametrize(
    "main, arguments",
    [
        pytest.param(char_lm.main, ["--size=tiny"], id="char_lm"),
        pytest.param(finetune_llama.main, ["--size=tiny", "--devices=2"], id="finetune_llama"),
        pytest.param(seq_classifier.main, ["--width=16"], id="seq_classifier"),
    ],
)
def test_example(tmp_path: Path, main: Main, arguments: list[str]) -> None:
    pipelined = losses(main, tmp_path / "pipe", *PIPED, *arguments)

    expected = losses(main, tmp_path / "plain", "--plain", "--accelerator=cpu", *arguments)
    assert pipelined == pytest.approx(expected, rel=1e-3)


def test_example_with_batch_norms(tmp_path: Path) -> None:
    # They normalise by micro-batch, so its losses are its own; the example compares its checkpoint
    # with a plain Trainer.
    found = losses(unet_segmentation.main, tmp_path, *PIPED, "--width=4", "--canvas=24")

    assert len(found) >= 2 and all(map(math.isfinite, found))
