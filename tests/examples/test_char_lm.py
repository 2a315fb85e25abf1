"""The character language model of examples/: its text, its model, its run and its configuration."""

import csv
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch

from examples import char_lm
from examples.char_lm import (
    ALPHABET,
    SIZES,
    TEXT,
    CharLM,
    TopicsData,
    encode,
    split,
    unigram_loss,
)
from lightning_gpipe import GPipeStrategy
from tests.support.examples import fit_by_cli

CONFIG = Path(__file__).parents[2] / "examples/configs/char_lm.yaml"


@pytest.fixture(scope="module")
def data() -> TopicsData:
    topics = TopicsData(context=32, batch_size=16)
    topics.setup("fit")
    return topics


@pytest.fixture
def model() -> CharLM:
    torch.manual_seed(0)
    return CharLM(context=16, blocks=2, width=32, heads=2).eval()


# The text


def test_validation_text_is_the_last_tenth():
    _, validation = split(TEXT)

    assert TEXT.endswith(validation)
    assert len(validation) == pytest.approx(len(TEXT) / 10, abs=1)


def test_training_text_has_no_paragraph_of_the_validation_text():
    training, validation = split("one more\n\nbb\n\nand then\n\nbb\n\nthe last\n\nbb")

    assert (training, validation) == ("one more\n\nand then\n\nthe last", "\n\nbb")

    training, validation = split(TEXT)

    assert not set(training.split("\n\n")) & set(validation.split("\n\n"))
    assert len(training) > 0.8 * len(TEXT)


def test_unigram_loss_of_a_fair_coin():
    coin = encode("ab" * 50_000)

    assert unigram_loss(coin, coin) == pytest.approx(math.log(2), abs=0.01)


def test_unigram_loss_goes_by_the_training_text():
    loss = unigram_loss(encode("aaab"), encode("b"))

    assert loss == pytest.approx(math.log((4 + len(ALPHABET)) / 2))  # each counts once more


def test_unigram_loss_of_the_text(data: TopicsData):
    # Each Python has another text, and each text its own entropy, which no prediction gets below.
    frequencies = torch.bincount(data.validation).double() / len(data.validation)
    entropy = torch.special.entr(frequencies).sum().item()

    loss = unigram_loss(data.training, data.validation)

    assert entropy < loss < entropy + 0.3 < math.log(len(ALPHABET))


def test_windows_pair_each_character_with_its_successor(data: TopicsData):
    for loader in data.train_dataloader(), data.val_dataloader():
        x, y = next(iter(loader))

        assert x.shape == y.shape == (16, 32)
        assert torch.equal(x[:, 1:], y[:, :-1])


def test_validation_windows_cover_the_text_once(data: TopicsData):
    targets = torch.cat([y.flatten() for _, y in data.val_dataloader()])

    assert torch.equal(targets, data.validation[1 : len(targets) + 1])
    assert len(data.validation) - 1 - len(targets) < data.context


def test_training_windows_follow_the_seed(data: TopicsData):
    batches = []
    for seed in 1, 1, 2:
        torch.manual_seed(seed)
        batches.append(next(iter(data.train_dataloader()))[0])

    assert torch.equal(batches[0], batches[1])
    assert not torch.equal(batches[0], batches[2])


# The model


def test_later_character_changes_no_earlier_score(model: CharLM):
    x = torch.randint(len(ALPHABET), (2, 16))
    changed = x.clone()
    changed[:, 9] = (changed[:, 9] + 1) % len(ALPHABET)

    scores, others = model.layers(x), model.layers(changed)

    torch.testing.assert_close(scores[:, :9], others[:, :9])
    assert not torch.isclose(scores[:, 9:], others[:, 9:]).all(dim=-1).any()


def test_generate_beyond_the_context(model: CharLM):
    text = model.generate("The ", characters=30)

    assert text.startswith("The ")
    assert len(text) == 34
    assert set(text) <= set(ALPHABET)


@pytest.mark.parametrize("steps", [1, 6, 20, 100])
def test_learning_rate_rises_then_falls(model: CharLM, steps: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(CharLM, "trainer", SimpleNamespace(estimated_stepping_batches=steps))
    configured: Any = model.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]

    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()

    highest = rates.index(max(rates))
    assert rates[: highest + 1] == sorted(rates[: highest + 1])
    assert rates[highest:] == sorted(rates[highest:], reverse=True)
    assert highest <= 0.1 * steps
    assert rates[-1] < 1e-3 * model.learning_rate


def test_gpt2_small_has_85_million_parameters():
    with torch.device("meta"):
        model = CharLM(**SIZES["gpt2-small"])

    width, characters = 768, len(ALPHABET)
    block = (4 + 8) * width**2 + (4 + 5) * width + 4 * width  # matrices, biases, two norms
    ends = (characters + 256) * width + 2 * width  # embeddings, last norm
    ends += (width + 1) * characters  # scores
    assert sum(parameter.numel() for parameter in model.parameters()) == 12 * block + ends
    assert 12 * block == 85_054_464


def test_gpt2_small_takes_a_step(data: TopicsData, tmp_path: Path):
    model = CharLM(**SIZES["gpt2-small"] | {"context": 16, "width": 96})  # 1/64 of each matrix
    weight = model.get_parameter("layers.7.expand.weight")
    before = weight[0].clone()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=GPipeStrategy("parameters", 2),
        fast_dev_run=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )

    trainer.fit(model, TopicsData(context=16, batch_size=2))

    assert trainer.global_step == 1
    assert not torch.equal(weight[0], before)


# The run


def run(output: Path, *arguments: str) -> float:
    """Train for a few steps and return the validation loss that was logged last."""
    few = "--size=tiny", "--steps=6", "--batch-size=16", "--validation-batches=4"
    char_lm.main([*few, f"--output={output}", *arguments])
    rows = csv.DictReader((output / "version_0/metrics.csv").read_text("utf-8").splitlines())
    return [float(row["val_loss"]) for row in rows if row["val_loss"]][-1]


def test_demo_reports_what_it_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    loss = run(tmp_path, "--balance=1,3", "--chunks=4")

    report = capsys.readouterr().out
    for line in (
        r"│     0 │ cpu    │ +layers\.0 │      1 │ Embedding ",
        r"│     1 │ cpu    │ layers\.1\.\.3\.1 │      4 │ Block x2, ",
        rf"│ val_loss +│ \d\.\d{{4}} +│ {loss:.4f} +│ {loss:.4f} +│",
        r"│ characters per second +│ [\d,]+ +│",
        r"│ bubble, by the schedule +│ 20\.0% +│",  # 1 / (4 + 2 - 1)
        r"\n\nThe ",
    ):
        assert re.search(line, report)


def test_bar_counts_the_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A Trainer with `max_steps` and no `max_epochs` has -1 epochs, and its bar says the last one.

    Lightning 2.6 counts epochs from 0, so the bar of the demo began with "Epoch 0/-2".
    """
    run(tmp_path)

    shown = capsys.readouterr().out
    assert re.findall(r"Epoch (\S+) .* (\d+/\d+) ", shown) == [("0/0", "6/6")]


def test_pipeline_learns_what_a_plain_run_learns(tmp_path: Path):
    plain = run(tmp_path / "plain", "--plain")
    pipelined = run(tmp_path / "pipelined")

    assert pipelined == pytest.approx(plain, rel=1e-4)


# The configuration


def test_configuration_trains_through_lightning_cli(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    options = {"trainer.limit_train_batches": 6, "trainer.val_check_interval": 3}

    trainer = fit_by_cli(CONFIG, tmp_path, options)

    assert trainer.global_step == 6
    assert re.search(r"Epoch 0/0 .* 6/6 ", capsys.readouterr().out)
    guess = math.log(len(ALPHABET))  # the loss of one who knows nothing of the text
    assert trainer.callback_metrics["val_loss"] < guess - 0.5
