"""The memory of each GPU: its own stage, and never the whole model."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks as library
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, StochasticWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpipe import GPipeStrategy
from tests.gpu.trainers import needs
from tests.support.lightning_modules import trainer

GPUS = 4
LAYERS = 16
SIDE = 256
STAGE = LAYERS // GPUS * SIDE * SIDE * 4  # bytes of the parameters of one stage

pytestmark = needs(GPUS)


class Adds(nn.Module):
    """Much weight, small activations, and no matrix product, for which cuBLAS takes memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(SIDE, SIDE))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight.mean()


class Wide(L.LightningModule):
    """Layers of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Adds() for _ in range(LAYERS)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layers(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.layers(batch[0]).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, foreach=False)


def data() -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(torch.ones(4, 8)), batch_size=4)


def made(root: Path, **options: Any) -> L.Trainer:
    strategy = GPipeStrategy(chunks=2)
    return trainer(root, strategy, accelerator="gpu", devices=GPUS, **options)


def peaks(work: Callable[[], Any]) -> list[float]:
    """The most memory that ``work`` used on each GPU, in units of a stage's parameters."""
    gc.collect()  # a Trainer and its module refer to one another: those before may be alive
    before = []
    for k in range(GPUS):
        torch.cuda.synchronize(k)
        before.append(torch.cuda.memory_allocated(k))
        torch.cuda.reset_peak_memory_stats(k)
    work()
    most = [torch.cuda.max_memory_allocated(k) - before[k] for k in range(GPUS)]
    return [each / STAGE for each in most]


def test_evaluation_has_the_parameters(tmp_path: Path) -> None:
    model = Wide()

    found = peaks(lambda: made(tmp_path).validate(model, data(), verbose=False))

    assert found == pytest.approx([1] * GPUS, rel=0.3)


def test_model_without_memory_is_made_in_parts(tmp_path: Path) -> None:
    one = made(tmp_path)
    with one.init_module(empty_init=True):
        model = Wide()

    found = peaks(lambda: one.validate(model, data(), verbose=False))

    assert found == pytest.approx([1] * GPUS, rel=0.3)


@pytest.mark.parametrize(
    "average, copies",
    [
        pytest.param(None, 2, id="none"),  # parameters and gradients
        pytest.param(
            lambda: StochasticWeightAveraging(0.05, swa_epoch_start=1, device=None), 3, id="SWA"
        ),
        pytest.param(
            lambda: library.EMAWeightAveraging(decay=0.8),
            3,
            id="EMA",
            marks=pytest.mark.skipif(
                not hasattr(library, "EMAWeightAveraging"), reason="new in Lightning 2.6"
            ),
        ),
    ],
)
def test_training_saving_and_resuming(tmp_path: Path, average: Any, copies: int) -> None:
    def fit(epochs: int, path: Path | None) -> Callable[[], None]:
        callbacks: list[Callback] = [ModelCheckpoint(tmp_path, filename="half")]
        if average is not None:
            callbacks.append(average())
        one = made(tmp_path, enable_checkpointing=True, callbacks=callbacks, max_epochs=epochs)
        return lambda: one.fit(Wide(), data(), data(), ckpt_path=path)

    first = peaks(fit(2, None))
    second = peaks(fit(4, tmp_path / "half.ckpt"))

    # On top come copies of one tensor at a time.
    for found in (first, second):
        assert all(copies <= each < copies + 0.9 for each in found), found
