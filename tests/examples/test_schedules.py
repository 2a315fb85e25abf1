"""Transparency: the examples train the same under each schedule, and over processes.

In float64, so that only the order of sums differs. The U-Net's batch norms normalise micro-batches,
under fill-drain as under the others, so all are compared with fill-drain of the same micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from examples import classify_digits, finetune_llama, seq_classifier
from examples.char_lm import SIZES, TEXT, CharLM, TopicsData
from examples.seq_classifier import Docstring, DocstringData, PackageClassifier
from examples.unet_segmentation import DigitsData, UNet
from lightning_gpipe import GPipeStrategy
from tests.examples.test_classify_digits import Small
from tests.support.lightning_modules import trainer
from tests.support.ranks import new_ranks
from tests.support.trainers import trainer_over

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

STEPS, CHUNKS = 4, 4


class Curve(Callback):
    """The loss of each step."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any
    ) -> None:
        self.losses.append(outputs["loss"])


class Digits(DigitsData):
    """In float64, as weights of a U-Net are."""

    def train_dataloader(self) -> DataLoader[Any]:
        batches = [(x.double(), y) for x, y in super().train_dataloader()]
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]  # a list will do


def characters() -> tuple[L.LightningModule, L.LightningDataModule]:
    return CharLM(**SIZES["tiny"]), TopicsData(context=32, batch_size=8)


def words() -> tuple[L.LightningModule, L.LightningDataModule]:
    return PackageClassifier(packages=3, blocks=2, width=16), DocstringData(3, batch_size=8)


def scans() -> tuple[L.LightningModule, L.LightningDataModule]:
    return UNet(width=4, levels=2), Digits(canvases=8 * STEPS, batch_size=8, size=24)


def tokens() -> tuple[L.LightningModule, L.LightningDataModule]:
    size = finetune_llama.SIZES["tiny"]
    model = finetune_llama.Llama(**size)
    model.configure_model()
    data = finetune_llama.TopicsTokens(24, 8, size["vocabulary"], training_windows=8 * STEPS)
    return model, data


class Scans(classify_digits.DigitsData):
    """In float64."""

    def setup(self, stage: str) -> None:
        super().setup(stage)
        images, digits = self.training.tensors
        self.training = TensorDataset(images.double(), digits)


def digits() -> tuple[L.LightningModule, L.LightningDataModule]:
    return classify_digits.Classifier(), Scans(8, 8, training_scans=8 * STEPS)


def some_docstrings() -> list[Docstring]:
    """Of three packages, of up to 24 words."""
    packages = "ast", "cmd", "dis"
    return [
        Docstring(packages[k % 3], k % 3, tuple(f"word{k * n % 30}" for n in range(1, 2 + k % 24)))
        for k in range(60)
    ]


# The build of each example, and its layers in two stages and in four.
EXAMPLES: dict[str, tuple[Callable[[], Any], Any, list[int]]] = {
    "characters": (characters, [2, 2], [1, 1, 1, 1]),
    "words": (words, [2, 2], [1, 1, 1, 1]),
    "scans": (scans, [8, 7], [4, 4, 4, 3]),
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "fill-drain, split": {"split_backward": True},
    "1F1B": {"schedule": "1f1b"},
    "1F1B, recomputed": {"schedule": "1f1b", "activation_checkpointing": "except_last"},
    "1F1B, split": {"schedule": "1f1b", "split_backward": True},
    "interleaved": {"schedule": "1f1b", "four": True},
    "zero bubble": {"schedule": "zero_bubble"},
}


# Those too that are no nn.Sequential, with their layers in two stages.
EVERY_EXAMPLE = EXAMPLES | {
    "tokens": (tokens, [1, 1], []),
    "digits": (digits, "parameters", []),
}


def curve(root: Path, name: str, options: Mapping[str, Any] | None) -> Tensor:
    """The losses of some steps; without options of a plain Trainer."""
    build, two, four = EVERY_EXAMPLE[name]
    strategy: GPipeStrategy | str = "auto"
    if options is not None:
        given = {"activation_checkpointing": "never"} | dict(options)
        balance = four if given.pop("four", False) else two
        strategy = GPipeStrategy(balance, CHUNKS, **given)
    devices = 1 if strategy == "auto" else 2
    return losses(build, partial(trainer, root, strategy, devices=devices))


def losses(build: Callable[[], Any], make_trainer: Callable[..., L.Trainer]) -> Tensor:
    """The losses of some steps of a Trainer."""
    found = Curve()
    L.seed_everything(0, verbose=False)
    model, data = build()
    limits = {"max_steps": STEPS, "limit_val_batches": 0, "num_sanity_val_steps": 0}
    make_trainer(callbacks=[found], **limits).fit(model.double(), data)
    return torch.stack(found.losses)


@pytest.mark.parametrize("name", EXAMPLES)
def test_same_losses_under_each_schedule(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seq_classifier, "docstrings", some_docstrings)
    expected = curve(tmp_path, name, {})
    plain = {} if name == "scans" else {"plain": None}

    found = {key: curve(tmp_path, name, each) for key, each in (plain | SCHEDULES).items()}

    assert len(expected) == STEPS and expected[-1] != expected[0]
    torch.testing.assert_close(found, dict.fromkeys(found, expected), rtol=1e-7, atol=0)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data and networks of examples that are smaller, or need no other library."""
    for change in SMALL:
        monkeypatch.setattr(*change)


SMALL: list[tuple[Any, str, Any]] = [
    (seq_classifier, "docstrings", some_docstrings),
    (finetune_llama, "TEXT", TEXT[: len(TEXT) // 8]),
    (classify_digits, "network", lambda name: Small().double()),
]


def curve_over_processes(root: Path, name: str, outputs: str) -> Tensor:
    """The losses of some steps under 1F1B, as one process of two knows them."""
    for module, attribute, value in SMALL:  # in a process that ends with the test
        setattr(module, attribute, value)
    build, two, _ = EVERY_EXAMPLE[name]
    strategy = {
        "chunks": CHUNKS,
        "schedule": "1f1b",
        "outputs": outputs,
        "activation_checkpointing": "never",
    }
    return losses(build, partial(trainer_over, root, "per_stage", two, strategy))


@pytest.mark.parametrize(
    "name, outputs",
    [
        ("characters", "last"),
        ("words", "all"),
        ("scans", "last"),
        ("tokens", "last"),
        ("digits", "all"),
    ],
)
def test_same_losses_over_processes(name: str, outputs: str, tmp_path: Path, small: None) -> None:
    expected = curve(tmp_path, name, {})

    with new_ranks(2) as ranks:
        found = ranks.run(curve_over_processes, tmp_path, name, outputs)

    assert len(expected) == STEPS and expected[-1] != expected[0]
    for each in found:
        torch.testing.assert_close(each, expected, rtol=1e-7, atol=0)
