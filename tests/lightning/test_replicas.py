"""Replicas of a pipeline, each with its part of a batch, train as a plain Trainer on the whole.

Here are also the tests of ``ddp`` and ``replicas``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, EarlyStopping, GradientAccumulationScheduler
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import SumMetric

from lightning_gpipe import GPipeStrategy
from tests.lightning.test_processes import checkpoint
from tests.support.lightning_modules import Classifier, rows, six_layers, trainer
from tests.support.models import assert_same
from tests.support.ranks import Pool, new_ranks
from tests.support.trainers import trainer_over

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

# The processes of a pipeline, its balance, and the devices and machines of two of them.
PLACES: dict[str, Any] = {
    "2x1": ("single", [2, 4], (4, 1)),
    "2x2": ("per_stage", [2, 4], (4, 1)),
    "2x2 nodes": ("per_node", [1, 2, 2, 1], (8, 4)),
}


class Logging(Classifier):
    """Logs the averages of all replicas, and counts rows with a metric."""

    def __init__(self, optimizer: str = "momentum", layers: nn.Sequential | None = None) -> None:
        super().__init__(optimizer, layers=layers)
        self.rows = SumMetric()
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("loss", loss, sync_dist=True)
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach().clone())))
        return loss

    def _evaluate(self, batch: Any, stage: str) -> None:
        x, y = batch
        output = self(x)
        self.accuracy(output, y)
        self.rows(len(x))
        self.log(f"{stage}_loss", F.cross_entropy(output, y), sync_dist=True)
        self.log(f"{stage}_accuracy", self.accuracy)
        self.log(f"{stage}_rows", self.rows)


class Halves(L.LightningDataModule):
    """Rows in batches, of which each replica gets its part."""

    def __init__(self, replicas: int) -> None:
        super().__init__()
        self.replicas = replicas

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        found = rows(20, seed=1)
        strategy, sampler = self.trainer.strategy, None
        if isinstance(strategy, GPipeStrategy | ModelParallelStrategy):
            part = strategy.distributed_sampler_kwargs
            sampler = DistributedSampler[Any](found, shuffle=False, **part)
        return DataLoader(found, batch_size=8 // self.replicas, sampler=sampler)

    def val_dataloader(self) -> Any:
        return DataLoader(rows(8, seed=2), batch_size=4 // self.replicas)


def result(model: L.LightningModule, made: L.Trainer) -> dict[str, Any]:
    """What came of a fit in this process."""
    return {
        "losses": getattr(model, "losses", None),
        "logged": {name: float(x) for name, x in made.callback_metrics.items()},
        "parameters": {n: p.detach() for n, p in model.named_parameters() if not p.is_meta},
        "step": made.global_step,
    }


class Manual(Logging):
    """Steps by itself, with a first step on a part of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            loss = super().training_step(batch, batch_idx)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        own = [self.head.parameters(), self.parameters()]
        return [torch.optim.SGD(each, 0.1) for each in own]


class Thawing(Logging):
    """Trains the first layers from the second epoch on."""

    def on_train_epoch_start(self) -> None:
        self.layers[:3].requires_grad_(self.current_epoch > 0)


class Blocks(Logging):
    """Loops over a list of blocks, one of which uses a parameter in some epochs only."""

    def __init__(self) -> None:
        super().__init__(layers=six_layers())
        self.layers = nn.ModuleList(self.layers)  # type: ignore[assignment]  # in its place
        self.gain = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.gain if self.current_epoch == 0 else x
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


BUILDS: dict[str, Any] = {
    "momentum": Logging,
    "adam": partial(Logging, "adam"),
    "manual": Manual,
    "thawing": Thawing,
    "blocks": Blocks,
}


Fitted = tuple[L.LightningModule, L.Trainer]


def fitted(
    root: Path,
    place: str,
    build: Callable[[], L.LightningModule],
    strategy: dict[str, Any],
    resume: Path | None = None,
    **options: Any,
) -> Fitted:
    """A fit of two replicas."""
    processes, balance, machines = PLACES[place]
    torch.manual_seed(0)
    model = build()
    made = trainer_over(
        root,
        processes,
        balance,
        {"replicas": 2, **strategy},
        machines,
        **{"max_epochs": 2, **options},
    )
    made.fit(model, datamodule=Halves(2), ckpt_path=resume)
    made.save_checkpoint(root / "end.ckpt")
    return model, made


def fitted_plainly(root: Path, build: Callable[[], L.LightningModule], **options: Any) -> Fitted:
    """The same fit without a pipeline, on whole batches."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build()
    made = trainer(root, **{"max_epochs": 2, **options})
    made.fit(model, datamodule=Halves(1))
    made.save_checkpoint(root / "end.ckpt")
    return model, made


def fit(root: Path, place: str, name: str, strategy: dict[str, Any], **options: Any) -> Any:
    return result(*fitted(root, place, BUILDS[name], strategy, **options))


def plain(root: Path, name: str, **options: Any) -> dict[str, Any]:
    return result(*fitted_plainly(root, BUILDS[name], **options))


def assert_close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    "place, name, strategy, options",
    [
        ("2x1", "momentum", {"ddp": {"bucket_cap_mb": 0.0001}}, {"gradient_clip_val": 0.05}),
        ("2x2", "adam", {}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}),
        ("2x2 nodes", "momentum", {"ddp": {"gradient_as_bucket_view": True}}, {}),
        ("2x1", "manual", {}, {}),
        ("2x2", "manual", {}, {}),
        ("2x2", "thawing", {}, {}),
        ("2x1", "blocks", {"ddp": {"find_unused_parameters": True}}, {}),
        ("2x2", "blocks", {"ddp": {"find_unused_parameters": True}}, {}),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_fit(
    tmp_path: Path,
    two_ranks: Pool,
    four_ranks: Pool,
    place: str,
    name: str,
    strategy: dict[str, Any],
    options: dict[str, Any],
) -> None:
    expected = plain(tmp_path / "plain", name, **options)
    pool = two_ranks if place == "2x1" else four_ranks

    found = pool.run(partial(fit, **options), tmp_path / "both", place, name, strategy)

    parameters = expected.pop("parameters")
    everywhere: dict[str, Tensor] = {}
    for each in found:
        own = each.pop("parameters")
        assert_close(own, {name: parameters[name] for name in own})
        assert_close(each, expected)
        everywhere |= own
    assert set(everywhere) == set(parameters)
    one, other = (checkpoint(tmp_path / run / "end.ckpt") for run in ("both", "plain"))
    assert_close(one["state_dict"], other["state_dict"])
    assert_close(one["optimizer_states"], other["optimizer_states"])


class Summing(Classifier):
    """Logs the sum of a column with metrics, of which one is of all replicas in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.all = SumMetric(), SumMetric(dist_sync_on_step=True)
        self.returned = SumMetric()
        self.seen: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for metric in (self.own, self.all):
            metric(batch[0][:, 0])
        self.log_dict({"own": self.own, "all": self.all}, on_step=True, on_epoch=True)
        self.log("returned", self.returned(batch[0][:, 0]), reduce_fx="sum")
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        logged = self.trainer.callback_metrics
        self.seen.append([float(logged[name]) for name in ("own_step", "all_step", "returned")])


def fit_summing(root: Path, schedule: str) -> dict[str, Any]:
    model = Summing()
    strategy = {"replicas": 2, "schedule": schedule}
    made = trainer_over(root, "single", [2, 4], strategy, (4, 1), max_epochs=1)
    made.fit(model, datamodule=Halves(2))
    return {"seen": model.seen, "epoch": float(made.callback_metrics["own_epoch"])}


class Looping(Classifier):
    """Loops over its layers in its own forward, which DDP calls the step through."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.layers)  # type: ignore[assignment]
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        output: Tensor = self.head(x)
        return output

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        return super().training_step(batch, batch_idx)


def fit_looping(root: Path, verify: Any) -> tuple[int, dict[str, Any]]:
    torch.manual_seed(0)
    model = Looping()
    strategy = {"replicas": 2, "module": "layers", "verify": verify}
    made = trainer_over(root, "single", [2, 4], strategy, (4, 1), max_epochs=1)
    made.fit(model, datamodule=Halves(2))
    return model.steps, {**model.state_dict(), "metrics": dict(made.callback_metrics)}


@pytest.mark.parametrize("verify", [True, "sample"])
def test_verification_runs_no_step(tmp_path: Path, two_ranks: Pool, verify: Any) -> None:
    """Once the first step ran twice, as the forward that DDP calls is the step, or it failed."""
    found, expected = (two_ranks.run(fit_looping, tmp_path, each) for each in (verify, False))

    assert [steps for steps, _ in found] == [steps for steps, _ in expected]
    assert_same([state for _, state in found], [state for _, state in expected])


@pytest.mark.parametrize("schedule", ["fill_drain", "1f1b"])
def test_step_values_of_metrics(tmp_path: Path, two_ranks: Pool, schedule: str) -> None:
    found = two_ranks.run(fit_summing, tmp_path, schedule)

    column = rows(20, seed=1).tensors[0][:, 0]
    for rank, each in enumerate(found):
        own = [float(x.sum()) for x in column[rank::2].split(4)]
        both = [float(x.sum()) for x in column.split(8)]
        expected = [[a, b, a] for a, b in zip(own, both, strict=True)]
        # A SumMetric adds in single precision.
        torch.testing.assert_close(torch.tensor(each["seen"]), torch.tensor(expected))
        assert each["epoch"] == pytest.approx(float(column.sum()), rel=1e-5)


# What each process is told.


class Asking(Classifier):
    """Notes what its Trainer says."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, Any] = {}

    def configure_model(self) -> None:
        mesh = self.device_mesh
        assert mesh is not None and mesh.mesh_dim_names is not None
        self.found["mesh"] = {name: mesh[name].get_local_rank() for name in mesh.mesh_dim_names}

    def on_train_epoch_start(self) -> None:
        rank = self.trainer.global_rank
        loader: Any = self.trainer.train_dataloader
        self.found["sampler"] = (loader.sampler.num_replicas, loader.sampler.rank)
        gathered: Any = self.all_gather(torch.tensor(rank))
        self.found["gathered"] = gathered.tolist()
        own = torch.tensor(float(rank), requires_grad=True)
        everyone: Any = self.all_gather(own, sync_grads=True)
        (everyone * torch.tensor([2.0, 3.0])).sum().backward()
        self.found["gradient"] = float(own.grad)  # type: ignore[arg-type]
        self.found["mean"] = float(self.trainer.strategy.reduce(torch.tensor(float(rank))))
        self.found["drawn"] = float(torch.rand(()))

    def on_train_epoch_end(self) -> None:
        self.log("own", float(self.trainer.global_rank > 1))


def ask(root: Path) -> dict[str, Any]:
    """What the processes of two replicas are told, whose seeds are their ranks."""
    torch.manual_seed(dist.get_rank())
    model = Asking()
    stopping = EarlyStopping("own", patience=1, mode="max", min_delta=0.1)
    made = trainer_over(
        root, "per_stage", [2, 4], {"replicas": 2}, (4, 1), callbacks=[stopping], max_epochs=9
    )
    made.fit(model, DataLoader(rows(8, seed=1), batch_size=2))
    return {**model.found, "epochs": made.current_epoch, "weight": model.head.weight.sum().item()}


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")
def test_what_the_processes_of_replicas_share(tmp_path: Path, four_ranks: Pool) -> None:
    found = four_ranks.run(ask, tmp_path)

    assert [each["mesh"] for each in found] == [
        {"data_parallel": replica, "pipeline_parallel": place, "tensor_parallel": 0}
        for replica in (0, 1)
        for place in (0, 1)
    ]
    assert [each["sampler"] for each in found] == [(2, 0), (2, 0), (2, 1), (2, 1)]
    assert [each["gathered"] for each in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [each["mean"] for each in found] == [1.0, 2.0, 1.0, 2.0]
    assert [each["gradient"] for each in found] == [4.0, 4.0, 6.0, 6.0]  # of both replicas' sums
    drawn = [each["drawn"] for each in found]
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3]
    assert len({each["weight"] for each in found}) == 1
    assert {each["epochs"] for each in found} == {2}  # one replica stops, so all do


class Raising(Callback):
    """Raises in one replica, between forward and backward."""

    def on_before_backward(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_rank == 3 and trainer.global_step == 2:
            raise KeyError("a callback")


def fit_raising(root: Path) -> str:
    made = trainer_over(root, "per_stage", [2, 4], {"replicas": 2}, (4, 1), callbacks=[Raising()])
    with pytest.raises((KeyError, RuntimeError)) as error:
        made.fit(Classifier(), DataLoader(rows(20, seed=1), batch_size=2))
    return f"{type(error.value).__name__}: {error.value}"


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")
def test_replica_that_raises(tmp_path: Path) -> None:
    with new_ranks(4) as ranks:
        found = ranks.run(fit_raising, tmp_path)

    assert found[3] == "KeyError: 'a callback'"
    assert found[2].startswith("RankFailed: rank 3 (stage 1) failed: KeyError: 'a callback'")
    assert found[:2] == ["RankFailed: rank 3 failed: KeyError: 'a callback'"] * 2


# What is refused.


@pytest.mark.parametrize(
    "strategy, message",
    [
        ({"ddp": {"static_graph": True}}, "with replicas=1. Write replicas=2"),
        ({"replicas": 2, "ddp": {"buckets": 1}}, "options of DistributedDataParallel: got buckets"),
    ],
)
def test_impossible_arguments(strategy: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPipeStrategy([2, 4], **strategy)


def refused(root: Path) -> list[str]:
    """What a fit of replicas says that cannot be."""
    found = []
    cases: list[tuple[L.LightningModule, dict[str, Any]]] = [
        (Logging(), {"accumulate_grad_batches": 2}),
        (Logging(), {"callbacks": [GradientAccumulationScheduler({1: 2})]}),
        (Manual(), {}),
    ]
    for model, options in cases:
        strategy = {"replicas": 2, "ddp": {"static_graph": True}}
        made = trainer_over(root, "single", [2, 4], strategy, (4, 1), **options)
        with pytest.raises(ValueError) as error:
            made.fit(model, datamodule=Halves(2))
        found.append(str(error.value).partition("got ")[2].partition(".")[0])
    return found


def test_static_graph_where_steps_differ(tmp_path: Path, two_ranks: Pool) -> None:
    found = two_ranks.run(refused, tmp_path)

    assert (
        found
        == [
            [
                "accumulate_grad_batches=2",
                "GradientAccumulationScheduler",
                "automatic_optimization=False",
            ]
        ]
        * 2
    )
