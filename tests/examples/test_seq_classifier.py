"""The docstring classifier of examples/: its text, its model, its figures and its configuration."""

import argparse
import csv
import sys
from pathlib import Path

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from examples import seq_classifier
from examples.seq_classifier import (
    Batch,
    Docstring,
    DocstringData,
    PackageClassifier,
    compare,
    docstrings,
    encode,
)
from lightning_gpipe import GPipeStrategy, PaddedSequences
from lightning_gpipe.cli import main as cli
from tests.support.pipes import Pipe

CONFIG = Path(__file__).parents[2] / "examples/configs/seq_classifier.yaml"
WORDS = [f"word{k}" for k in range(20)]


def samples(*lengths: int) -> list[Docstring]:
    """Docstrings of so many words."""
    return [
        Docstring("zlib", k % 3, tuple(WORDS[k : k + length])) for k, length in enumerate(lengths)
    ]


@pytest.fixture
def data() -> DocstringData:
    """Made for two packages, and without their docstrings."""
    made = DocstringData(packages=2)
    made.names = ["ast", "zlib"]
    return made


@pytest.fixture
def batches(data: DocstringData) -> list[Batch]:
    """As padded, 4 * 9 + 4 * 6 = 60 tokens.

    In two micro-batches of two rows::

        as they come        3 9 | 1 5 and 6 2 | 6 1    2 * (9 + 5) + 2 * (6 + 6) = 52 tokens
        in order of length  9 5 | 3 1 and 6 6 | 2 1    2 * (9 + 3) + 2 * (6 + 2) = 40 tokens
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


def test_validation_has_no_text_of_training():
    data = DocstringData()

    data.setup("fit")

    training = {each.words for each in data.training}
    validation = {each.words for each in data.validation}
    assert not training & validation
    assert len(data.training) == pytest.approx(4 * len(data.validation), abs=4)
    assert len(data.training) > 2000


def test_collate_pads_to_the_longest(data: DocstringData):
    one, two, three = encode(["one", "two", "three"]).tolist()

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

    alone = [model(data.collate([each])[0])["scores"] for each in several]

    torch.testing.assert_close(model(together)["scores"], torch.cat(alone))


def gradients(model: PackageClassifier, output: dict[str, Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(output["scores"].square().sum(), list(model.parameters())))


def test_pipeline_trims_and_gives_what_the_plain_model_gives(
    model: PackageClassifier, batches: list[Batch], pipe: Pipe
):
    [(inputs, _), _] = batches
    plain = model(inputs)
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


def test_comparison_of_ways(model: PackageClassifier, batches: list[Batch]):
    options = argparse.Namespace(accelerator="cpu", devices=2, chunks=2)

    table = compare(options, model, batches)

    names, computed, saved, *_, gain = (list(column.cells) for column in table.columns)
    assert names == ["Rows", "PaddedSequences, unsorted", "PaddedSequences", "the words alone"]
    assert computed == ["60", "52", "40", "33"]
    assert saved == ["0.0%", "13.3%", "33.3%", "45.0%"]
    assert gain[0] == "1.00"


# The run


@pytest.fixture
def few_docstrings(monkeypatch: pytest.MonkeyPatch) -> None:
    few = docstrings()[::20]
    monkeypatch.setattr(seq_classifier, "docstrings", lambda: few)


def run(output: Path) -> None:
    options = {"--epochs": 1, "--steps": 2, "--repeats": 1, "--width": 16, "--output": output}
    seq_classifier.main([f"{name}={value}" for name, value in options.items()])


@pytest.mark.usefixtures("few_docstrings")
def test_demo_reports_what_it_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run(tmp_path)

    report = capsys.readouterr().out
    rows = list(
        csv.DictReader((tmp_path / "version_0/metrics.csv").read_text("utf-8").splitlines())
    )
    padded, computed = (
        next(float(row[name]) for row in rows if row[name])
        for name in ("tokens_padded", "tokens_computed")
    )
    [accuracy] = [float(row["val_accuracy"]) for row in rows if row["val_accuracy"]]
    for line in (
        f"validation accuracy                                 │ {accuracy:.1%} ",
        "the same, always guessing ",
        "largest difference to the scores of a plain Trainer │ ",
        f"tokens of the last epoch, padded                    │ {padded:,.0f} ",
        f"tokens of the last epoch, computed                  │ {computed:,.0f} ",
        f"saved                                               │ {1 - computed / padded:.1%} ",
        "│ Rows ",
    ):
        assert line in report
    assert computed < 0.5 * padded
    assert (tmp_path / "version_0/checkpoints/best.ckpt").exists()


@pytest.mark.usefixtures("few_docstrings")
def test_checkpoint_with_other_scores_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    predict = seq_classifier.predict

    def predict_otherwise(trainer: L.Trainer, checkpoint: str, data: DocstringData) -> Tensor:
        scores = predict(trainer, checkpoint, data)
        return scores if isinstance(trainer.strategy, GPipeStrategy) else scores + 0.1

    monkeypatch.setattr(seq_classifier, "predict", predict_otherwise)

    with pytest.raises(SystemExit, match="must be the same: they differ by 0.1"):
        run(tmp_path)


# The configuration


# Lightning 2.6, cli.py, calls ArgumentParser.add_instantiator, deprecated in jsonargparse 4.49.
@pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning.pytorch.cli")
def test_configuration_trains_through_lightning_cli(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    options = {
        "--config": CONFIG,
        "--trainer.max_epochs": 1,
        "--trainer.limit_train_batches": 2,
        "--trainer.limit_val_batches": 2,
        "--trainer.logger.init_args.save_dir": tmp_path,
    }
    arguments = [f"{name}={value}" for name, value in options.items()]
    monkeypatch.setattr(sys, "argv", ["lightning_gpipe", "fit", *arguments])

    trainer = cli().trainer

    assert isinstance(trainer.strategy, GPipeStrategy)
    assert trainer.num_devices == 2
    assert trainer.global_step == 2
    metrics = trainer.callback_metrics
    assert metrics["tokens_computed"] < 0.5 * metrics["tokens_padded"]
