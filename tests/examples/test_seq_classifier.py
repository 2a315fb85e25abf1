"""The docstring classifier of examples/: its text, its model, its figures and its configuration."""

import csv
import re
import shutil
import sysconfig
from pathlib import Path
from zlib import crc32

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from examples import seq_classifier
from examples.seq_classifier import (
    CODES,
    Batch,
    Docstring,
    DocstringData,
    PackageClassifier,
    docstrings,
)
from lightning_gpipe import GPipeStrategy, PaddedSequences
from tests.support.examples import fit_by_cli
from tests.support.pipes import Pipe

CONFIG = Path(__file__).parents[2] / "examples/configs/seq_classifier.yaml"

WORDS = [f"word{k}" for k in range(20)]
PACKAGES = (
    "asyncio collections concurrent ctypes dbm email encodings html http importlib json logging "
    "multiprocessing re sqlite3 unittest urllib wsgiref xml"
)


def samples(*lengths: int) -> list[Docstring]:
    """Docstrings of so many words."""
    return [
        Docstring("zlib", k % 3, tuple(WORDS[k : k + length])) for k, length in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def part_of_the_library(tmp_path_factory: pytest.TempPathFactory) -> list[Docstring]:
    """The docstrings of some packages, as all take seconds to read."""
    library, part = Path(sysconfig.get_path("stdlib")), tmp_path_factory.mktemp("library")
    for name in PACKAGES.split():
        shutil.copytree(library / name, part / name, ignore=shutil.ignore_patterns("__pycache__"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sysconfig.get_path", lambda _: part)
        return docstrings.__wrapped__()


@pytest.fixture
def some_docstrings(monkeypatch: pytest.MonkeyPatch, part_of_the_library: list[Docstring]) -> None:
    monkeypatch.setattr(seq_classifier, "docstrings", lambda: part_of_the_library)


@pytest.fixture
def data() -> DocstringData:
    """Made for two packages, and without their docstrings."""
    made = DocstringData(packages=2)
    made.names = ["ast", "zlib"]
    return made


@pytest.fixture
def batches(data: DocstringData) -> list[Batch]:
    """As padded, 4 * 9 + 4 * 6 = 60 tokens; in two micro-batches of two rows in order of length::

    9 5 | 3 1 and 6 6 | 2 1    2 * (9 + 3) + 2 * (6 + 2) = 40 tokens
    """
    return [data.collate(samples(3, 9, 1, 5)), data.collate(samples(6, 2, 6, 1))]


@pytest.fixture
def model() -> PackageClassifier:
    torch.manual_seed(0)
    return PackageClassifier(packages=2, blocks=2, width=16).double()


# The docstrings


def test_docstrings_of_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files = {
        "json/__init__.py": '"""Reads, writes."""\ndef f(): "In both."',
        "json/decoder.py": 'class A: "Twice."\nclass B: "Twice."\nasync def g(): "Waits" "."',
        "zlib.py": 'def h(): "In both."\ndef i(): return "No docstring."',
        "json/tests/test_json.py": '"""Of a test."""',
        "site-packages/other.py": '"""Of another."""',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.setattr("sysconfig.get_path", lambda _: tmp_path)

    assert docstrings.__wrapped__() == [
        Docstring("json", 0, ("Reads", ",", "writes", ".")),
        Docstring("json", 1, ("Twice", ".")),
        Docstring("json", 3, ("Waits", ".")),
    ]


@pytest.mark.usefixtures("some_docstrings")
def test_validation_has_no_text_of_training():
    data = DocstringData()

    data.setup("fit")

    training = {each.words for each in data.training}
    validation = {each.words for each in data.validation}
    assert not training & validation
    assert len(data.training) == pytest.approx(4 * len(data.validation), abs=4)
    assert len(data.training) > 500


def test_collate_pads_to_the_longest(data: DocstringData):
    one, two, three = (crc32(word) % CODES for word in (b"one", b"two", b"three"))

    inputs, packages = data.collate(
        [Docstring("zlib", 2, ("one", "two")), Docstring("ast", 0, ("one", "two", "three"))]
    )

    assert inputs["tokens"].tolist() == [[one, two, 0], [one, two, three]]
    assert inputs["lengths"].tolist() == [2, 3]
    assert inputs["additional_info"]["kind"].tolist() == [2, 0]
    assert packages.tolist() == [1, 0]


# The model


def test_scores_of_a_docstring_among_longer_ones(model: PackageClassifier, data: DocstringData):
    several = samples(3, 9, 1, 5)
    together, _ = data.collate(several)

    alone = [model.layers(data.collate([each])[0])["scores"] for each in several]

    torch.testing.assert_close(model.layers(together)["scores"], torch.cat(alone))


def gradients(model: PackageClassifier, output: dict[str, Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(output["scores"].square().sum(), list(model.parameters())))


def test_pipeline_trims_and_gives_what_the_plain_model_gives(
    model: PackageClassifier, batches: list[Batch], pipe: Pipe
):
    [(inputs, _), _] = batches
    plain = model.layers(inputs)
    expected = gradients(model, plain)
    trim = PaddedSequences("lengths", trim=["tokens"], pad_outputs=False)

    found = pipe(model.layers, chunks=2, microbatching=trim, copy=False)(inputs)

    torch.testing.assert_close(found["scores"], plain["scores"])
    torch.testing.assert_close(gradients(model, found), expected)
    assert plain["computed"].tolist() == [9, 9, 9, 9]
    assert found["computed"].tolist() == [5, 9, 5, 5]  # of 3, 9, 1 and 5 words


# The figures


def test_tokens_of_an_epoch(model: PackageClassifier, batches: list[Batch]):
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=GPipeStrategy(
            [2, 2],
            chunks=2,
            microbatching=PaddedSequences("lengths", trim=["tokens"], pad_outputs=False),
        ),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )

    loader = DataLoader[Batch](batches, batch_size=None)  # type: ignore[arg-type]  # a list is enough
    trainer.fit(model, loader, loader)

    assert trainer.callback_metrics["tokens_padded"] == 60
    assert trainer.callback_metrics["tokens_computed"] == 40


# The run


@pytest.fixture
def few_docstrings(monkeypatch: pytest.MonkeyPatch, part_of_the_library: list[Docstring]) -> None:
    few = part_of_the_library[::5]
    monkeypatch.setattr(seq_classifier, "docstrings", lambda: few)


def run(output: Path, *arguments: str) -> list[dict[str, str]]:
    """Train for two steps and return the rows of metrics.csv."""
    seq_classifier.main(["--steps=2", "--width=16", f"--output={output}", *arguments])
    return list(csv.DictReader((output / "version_0/metrics.csv").read_text("utf-8").splitlines()))


@pytest.mark.usefixtures("few_docstrings")
def test_demo_reports_what_it_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = run(tmp_path)

    report = capsys.readouterr().out
    padded, computed, accuracy = (
        next(float(row[name]) for row in rows if row[name])
        for name in ("tokens_padded", "tokens_computed", "val_accuracy")
    )
    for line in (
        rf"│ val_accuracy +│ 0\.\d{{4}} +│ {accuracy:.4f} +│ {accuracy:.4f} +│",
        rf"│ tokens saved in the last epoch +│ {1 - computed / padded:.1%} +│",
        r"│ docstrings per second +│ [\d,]+ +│",
    ):
        assert re.search(line, report)
    assert computed < 0.5 * padded


@pytest.mark.usefixtures("few_docstrings")
def test_run_that_trims_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run(tmp_path, "--untrimmed")

    assert re.search(r"│ tokens saved in the last epoch +│ 0\.0% +│", capsys.readouterr().out)


# The configuration


@pytest.mark.usefixtures("some_docstrings")
def test_configuration_trains_through_lightning_cli(tmp_path: Path):
    options = {
        "trainer.max_epochs": 1,
        "trainer.limit_train_batches": 2,
        "trainer.limit_val_batches": 2,
    }

    trainer = fit_by_cli(CONFIG, tmp_path, options)

    assert trainer.global_step == 2
    metrics = trainer.callback_metrics
    assert metrics["tokens_computed"] < 0.5 * metrics["tokens_padded"]
