"""Trainer(accelerator="gpu", devices=1): the pipeline's stages share one GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.checkpoints.portable import on_cpu
from tests.gpu.models import ON_GPU
from tests.support.lightning_modules import (
    Classifier,
    Data,
    assert_same_weights,
    fitted,
    trainer,
    weights,
)

pytestmark = [*ON_GPU, pytest.mark.filterwarnings("ignore:All 2 stages of the pipeline share one")]


def run(root: Path, *args: Any, **options: Any) -> L.Trainer:
    return fitted(root, *args, accelerator="gpu", devices=1, **options)


def stages() -> GPipeStrategy:
    return GPipeStrategy([2, 4], chunks=3)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_clip_val": 0.05},
        {"accumulate_grad_batches": 3},
    ],
    ids=str,
)
def test_fit(tmp_path: Path, options: dict[str, Any]) -> None:
    plain = run(tmp_path, **options)

    pipelined = run(tmp_path, stages(), **options)

    assert_same_weights(pipelined, plain)
    torch.testing.assert_close(pipelined.callback_metrics, plain.callback_metrics)


def test_tied_weights_are_one_tensor_in_the_checkpoint() -> None:
    one, two = nn.Linear(2, 2, device="cuda"), nn.Linear(2, 2, device="cuda")
    two.weight = one.weight

    state = on_cpu({"state_dict": nn.Sequential(one, two).state_dict()})["state_dict"]

    assert state["0.weight"].data_ptr() == state["1.weight"].data_ptr()
    assert {value.device.type for value in state.values()} == {"cpu"}


def test_stages_that_share_the_gpu_warn(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="All 2 stages.*share one device.*Write Trainer.devices=2"):
        run(tmp_path, stages(), max_steps=1)


def test_everything_is_on_the_gpu_during_the_fit_and_back_afterwards(tmp_path: Path) -> None:
    class Looks(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
            (optimizer,) = trainer.optimizers
            state = [t for s in optimizer.state.values() for t in s.values()]
            tensors = [*pl_module.state_dict().values(), *filter(torch.is_tensor, state)]
            seen.update(tensor.device.type for tensor in tensors)

    seen: set[str] = set()

    made = run(tmp_path, stages(), callbacks=[Looks()])

    assert seen == {"cuda"}
    assert {value.device.type for value in weights(made).values()} == {"cpu"}


def devices_in(value: Any) -> set[str]:
    """The devices of all tensors in a nested value."""
    if isinstance(value, Tensor):
        return {value.device.type}
    items = value.values() if isinstance(value, dict) else value
    nested = isinstance(value, dict | list | tuple)
    return set().union(*map(devices_in, items)) if nested else set()


def test_checkpoint_goes_to_the_cpu_and_comes_back(tmp_path: Path) -> None:
    class Saves(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.current_epoch == 1:
                trainer.save_checkpoint(tmp_path / "half.ckpt")

    whole = run(tmp_path, stages(), max_epochs=4, callbacks=[Saves()])

    checkpoint = torch.load(tmp_path / "half.ckpt", weights_only=True)
    on_cpu = fitted(tmp_path, ckpt_path=tmp_path / "half.ckpt", max_epochs=4)
    on_gpu = run(tmp_path, stages(), ckpt_path=tmp_path / "half.ckpt", max_epochs=4)

    assert devices_in(checkpoint) == {"cpu"}
    assert_same_weights(on_cpu, whole)
    assert_same_weights(on_gpu, whole)


@pytest.mark.parametrize("method", ["validate", "test"])
def test_evaluation(tmp_path: Path, method: str) -> None:
    torch.manual_seed(0)
    model = Classifier()
    plain, pipelined = (
        trainer(tmp_path, strategy, accelerator="gpu") for strategy in ("auto", stages())
    )

    expected = getattr(plain, method)(model, datamodule=Data(), verbose=False)
    found = getattr(pipelined, method)(model, datamodule=Data(), verbose=False)

    torch.testing.assert_close(found, expected)


class Single(Classifier):
    """In float32, and with a loss that overflows in one batch if wanted."""

    overflow = False

    def __init__(self) -> None:
        super().__init__()
        self.float()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        return loss * float("inf") if self.overflow and batch_idx == 1 else loss


class Overflowing(Single):
    overflow = True


@pytest.mark.parametrize(
    "build, precision",
    [(Single, "16-mixed"), (Overflowing, "16-mixed"), (Single, "bf16-mixed")],
)
def test_mixed_precision(tmp_path: Path, build: type[Single], precision: Any) -> None:
    plain = run(tmp_path, build=build, precision=precision, gradient_clip_val=1.0)
    pipelined = run(tmp_path, stages(), build=build, precision=precision, gradient_clip_val=1.0)

    assert all(value.isfinite().all() for value in weights(pipelined).values())
    torch.testing.assert_close(weights(pipelined), weights(plain), rtol=2e-2, atol=5e-3)
    scalers = [made.precision_plugin.state_dict() for made in (pipelined, plain)]
    assert scalers[0] == scalers[1]
    if build is Overflowing:
        assert scalers[0]["scale"] < 65536, "no step was skipped"
