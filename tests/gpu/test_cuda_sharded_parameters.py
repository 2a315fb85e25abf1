"""Replicas that divide the parameters of stages: numbers, hazards and memory on GPUs."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.fabric.utilities import distributed
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from lightning_gpipe.distributed import ReplicaWeights
from tests.gpu.models import ON_GPU
from tests.gpu.test_cuda_processes import hazards
from tests.gpu.test_cuda_replicas import on_host
from tests.lightning.test_replicas import Halves
from tests.support.lightning_modules import CLASSES, FEATURES, trainer
from tests.support.ranks import NCCL, Pool
from tests.support.trainers import trainer_over

pytestmark = [
    *ON_GPU,
    pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs"),
    pytest.mark.usefixtures("one_intra_op_thread"),
]

SIMULATED = "SIMULATED_GPUS" in os.environ
SIDE = 64
LAYERS = 12
LAYER = SIDE * (SIDE + 1) * 8  # bytes
OPTIONS: dict[str, Any] = {
    "max_epochs": 2,
    "gradient_clip_val": 0.05,
    "accumulate_grad_batches": 2,
}


class Deep(L.LightningModule):
    """Alike layers, and nothing around the pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(SIDE, SIDE) for _ in range(LAYERS))).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = F.pad(x.double(), (0, SIDE - FEATURES))
        return F.cross_entropy(self.layers(x)[:, :CLASSES], y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.001)


class FullySharded(Deep):
    """Divides each layer by ``fully_shard``."""

    def configure_model(self) -> None:
        if self.device_mesh is not None:
            for layer in self.layers:
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])


class Peak(Callback):
    """Records the most bytes that the devices have in steps, after the first, and between."""

    def __init__(self) -> None:
        self.most = 0
        self.between = 0
        self._before: dict[torch.device, int] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        gc.collect()  # a fit before
        all_devices = [torch.device("cuda", k) for k in range(torch.cuda.device_count())]
        self._before = {device: torch.cuda.memory_allocated(device) for device in all_devices}

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        for device in self._devices(trainer):
            torch.cuda.reset_peak_memory_stats(device)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step:
            before = self._before
            for device in self._devices(trainer):
                most = torch.cuda.max_memory_allocated(device) - before[device]
                self.most = max(self.most, most)
                now = torch.cuda.memory_allocated(device) - before[device]
                self.between = max(self.between, now)

    def _devices(self, trainer: L.Trainer) -> list[torch.device]:
        strategy: Any = trainer.strategy
        return list(strategy.pipeline.layout.devices)


@contextmanager
def without_waits() -> Iterator[None]:
    """Let stages run before their weights have come."""
    with patch.object(ReplicaWeights, "_wait", lambda weights, sent: None):
        yield


def fit(
    root: Path,
    schedule: str,
    sharding: str,
    balance: list[int],
    *,
    waits: bool = True,
    build: type[Deep] = Deep,
) -> tuple[dict[str, Tensor], list[str], Peak]:
    """The weights after a fit of two replicas with two GPUs each, and the hazards."""
    torch.manual_seed(0)
    model, peak = build(), Peak()
    strategy = {
        "replicas": 2,
        "schedule": schedule,
        "sharding": sharding,
        "chunks": 2,
        "ddp": {"init_sync": False, "broadcast_buffers": False},
        "process_group_backend": "gloo" if SIMULATED else NCCL,
    }
    options = {**OPTIONS, "callbacks": [peak], "accelerator": "gpu"}
    made = trainer_over(root, "single", balance, strategy, (4, 1), **options)
    with (
        patch.object(distributed, "_sync_ddp", partial(on_host, distributed._sync_ddp)),
        nullcontext() if waits else without_waits(),
    ):
        made.fit(model, datamodule=Halves(2))
    named = model.named_parameters()
    return {name: x.detach().cpu() for name, x in named if not x.is_meta}, hazards(), peak


@pytest.mark.parametrize(
    "schedule, balance, build",
    [
        ("fill_drain", [6, 6], Deep),
        ("1f1b", [6, 6], Deep),
        ("zero_bubble", [6, 6], Deep),
        ("zero_bubble_v", [3] * 4, Deep),
        ("fill_drain", [1] * 12, Deep),
        ("1f1b", [2] * 6, Deep),
        ("1f1b", [2] * 6, FullySharded),
    ],
)
def test_same_numbers_as_one_process(
    tmp_path: Path, two_ranks: Pool, schedule: str, balance: list[int], build: type[Deep]
) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Deep()
    trainer(tmp_path / "plain", **OPTIONS).fit(model, datamodule=Halves(1))
    expected = {name: x.detach() for name, x in model.named_parameters()}

    everywhere: dict[str, Tensor] = {}
    run = partial(fit, build=build)
    for found, races, _ in two_ranks.run(run, tmp_path, schedule, "parameters", balance):
        assert not races
        assert len(found) < len(expected) and not everywhere.keys() & found.keys()
        everywhere |= found
    torch.testing.assert_close(everywhere, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.skipif(not SIMULATED, reason="a GPU has no clocks")
def test_stage_that_does_not_wait_for_its_weights(tmp_path: Path, two_ranks: Pool) -> None:
    run = partial(fit, waits=False)

    for _, races, _ in two_ranks.run(run, tmp_path, "fill_drain", "parameters", [1] * 12):
        assert races


@pytest.mark.skipif(not SIMULATED, reason="a GPU's blocks are larger")
def test_memory_of_two_stages(tmp_path: Path, two_ranks: Pool) -> None:
    stages = LAYERS // 2  # on each device
    whole, divided = (
        two_ranks.run(fit, tmp_path / sharding, "fill_drain", sharding, [1] * LAYERS)
        for sharding in ("gradients", "parameters")
    )

    for (*_, before), (*_, after) in zip(whole, divided, strict=True):
        # Half of the weights, and the other half of two stages, as against all.
        assert before.between - after.between >= 0.95 * stages * LAYER / 2
        assert before.most - after.most >= 0.75 * (stages * LAYER / 2 - 2 * LAYER / 2)
