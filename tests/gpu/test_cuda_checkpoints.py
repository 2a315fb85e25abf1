"""Checkpoints that move between several GPUs, one GPU and the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor

from lightning_gpipe import GPipeStrategy
from tests.gpu.trainers import MANY, Deep, devices_in, needs, on_many_gpus, piped, places, plain
from tests.support.lightning_modules import Data, assert_same_weights, fitted, weights

pytestmark = needs(2)
Fit = Callable[..., L.Trainer]


def on_cpus(root: Path, **options: Any) -> L.Trainer:
    return fitted(root, GPipeStrategy(chunks=3), devices=2, **options)


def over(*devices: int) -> Fit:
    """A fit in a pipeline over these GPUs."""
    return lambda root, **options: piped(root, list(devices), **options)


# Where a checkpoint is saved, and where it is loaded.
PLACES: dict[str, Fit] = {
    "cpu": fitted,
    "pipeline-on-cpus": on_cpus,
    "one-gpu": plain,
    "two-gpus": over(0, 1),
    "gpus-in-another-order": over(1, 0),
    "many-gpus": over(*range(MANY)),
}


class Saves(Callback):
    """Saves in the middle of the fit."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(self.path)


class Looks(Callback):
    """Notes tensors of optimizers that are not on their parameter's device."""

    def __init__(self) -> None:
        self.misplaced: list[Tensor] = []

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        (optimizer,) = trainer.optimizers
        for parameter, state in optimizer.state.items():
            tensors = [each for each in state.values() if isinstance(each, Tensor)]
            self.misplaced += [t for t in tensors if t.dim() > 0 and t.device != parameter.device]


@pytest.mark.parametrize(
    "source, optimizer", [*((place, "adam") for place in PLACES), ("many-gpus", "momentum")]
)
def test_resume_elsewhere(tmp_path: Path, source: str, optimizer: str) -> None:
    path = tmp_path / "half.ckpt"
    build = partial(Deep, optimizer)
    options: dict[str, Any] = {"build": build, "max_epochs": 4}
    whole = PLACES[source](tmp_path, **options, callbacks=[Saves(path)])

    for fit in PLACES.values():
        looks = Looks()
        resumed = fit(tmp_path, **options, ckpt_path=path, callbacks=[looks])

        assert_same_weights(resumed, whole)
        assert looks.misplaced == []


@on_many_gpus
def test_scale_of_the_gradients_is_resumed(tmp_path: Path, gpus: int) -> None:
    path = tmp_path / "half.ckpt"
    options: dict[str, Any] = {"max_epochs": 4, "precision": "16-mixed"}
    whole = piped(tmp_path, gpus, callbacks=[Saves(path)], **options)

    for fit in (partial(piped, devices=gpus), partial(piped, devices=2), plain):
        resumed = fit(tmp_path, ckpt_path=path, **options)

        torch.testing.assert_close(weights(resumed), weights(whole), rtol=2e-2, atol=5e-3)
        assert resumed.precision_plugin.state_dict() == whole.precision_plugin.state_dict()


@on_many_gpus
def test_best_and_last(tmp_path: Path, gpus: int) -> None:
    def saved(fit: Fit) -> tuple[L.Trainer, ModelCheckpoint]:
        best = ModelCheckpoint(tmp_path / fit.__name__, monitor="val_loss", save_last=True)
        return fit(tmp_path, enable_checkpointing=True, callbacks=[best]), best

    def pipelined(root: Path, **options: Any) -> L.Trainer:
        return piped(root, gpus, **options)

    found, best = saved(pipelined)

    alone, expected = saved(plain)
    assert Path(best.best_model_path).name == Path(expected.best_model_path).name
    for path in (best.best_model_path, best.last_model_path):
        assert devices_in(torch.load(path, weights_only=True)) == {"cpu"}
        assert {each.type for each in places(Deep.load_from_checkpoint(path)).values()} == {"cpu"}
    for name in ("best", "last"):
        torch.testing.assert_close(
            found.test(ckpt_path=name, datamodule=Data(), verbose=False),
            alone.test(ckpt_path=name, datamodule=Data(), verbose=False),
        )


@on_many_gpus
def test_saved_by_another_thread(tmp_path: Path, gpus: int) -> None:
    best = ModelCheckpoint(tmp_path / "async")

    made = piped(
        tmp_path, gpus, enable_checkpointing=True, callbacks=[best], plugins=[AsyncCheckpointIO()]
    )

    checkpoint = torch.load(best.best_model_path, weights_only=True)
    assert devices_in(checkpoint) == {"cpu"}
    torch.testing.assert_close(checkpoint["state_dict"], weights(made), rtol=0, atol=0)
