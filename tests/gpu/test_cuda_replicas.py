"""Replicas with weights on the host: gradients come home, are averaged there, and divided."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.fabric.utilities import distributed
from torch import Tensor, nn

from tests.gpu.models import ON_GPU
from tests.gpu.test_cuda_processes import hazards
from tests.lightning.test_replicas import Halves
from tests.support.lightning_modules import CLASSES, FEATURES, WIDTH, trainer
from tests.support.ranks import Pool
from tests.support.trainers import trainer_over

pytestmark = [
    *ON_GPU,
    pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs"),
    pytest.mark.usefixtures("one_intra_op_thread"),
]


class Stacked(L.LightningModule):
    """Nothing around the pipeline, so that all gradients are at home on the host."""

    def __init__(self) -> None:
        super().__init__()
        widths = [FEATURES, *[WIDTH] * 3, CLASSES]
        layers = [nn.Linear(m, n) for m, n in pairwise(widths)]
        self.layers = nn.Sequential(*layers).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.layers(x.double()), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def on_host(reduce: Callable[..., Tensor], value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Reduce a value as Lightning does, on the host: Gloo cannot read a simulated GPU."""
    return reduce(value.cpu(), *args, **kwargs).to(value.device)


OPTIONS: dict[str, Any] = {
    "max_epochs": 2,
    "gradient_clip_val": 0.05,
    "accumulate_grad_batches": 2,
}


def fit(root: Path, schedule: str, sharding: str | None) -> tuple[dict[str, Tensor], list[str]]:
    """The weights after a fit of two replicas with two GPUs each, and the hazards."""
    torch.manual_seed(0)
    model = Stacked()
    strategy = {
        "replicas": 2,
        "schedule": schedule,
        "sharding": sharding,
        "weights": "host",
        "chunks": 2,
        "process_group_backend": "gloo",
    }
    made = trainer_over(root, "single", [1] * 4, strategy, (4, 1), accelerator="gpu", **OPTIONS)
    with patch.object(distributed, "_sync_ddp", partial(on_host, distributed._sync_ddp)):
        made.fit(model, datamodule=Halves(2))
    return {name: x.detach().cpu() for name, x in model.named_parameters()}, hazards()


@pytest.mark.parametrize("schedule", ["fill_drain", "1f1b"])
@pytest.mark.parametrize("sharding", [None, "optimizer", "gradients"])
def test_same_numbers_as_one_process(
    tmp_path: Path, two_ranks: Pool, schedule: str, sharding: str | None
) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Stacked()
    trainer(tmp_path / "plain", **OPTIONS).fit(model, datamodule=Halves(1))
    expected = {name: x.detach() for name, x in model.named_parameters()}

    for found, races in two_ranks.run(fit, tmp_path / "both", schedule, sharding):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
        assert not races
