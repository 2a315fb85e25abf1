"""Replicas of which one has each averaged gradient, or parameter, train as a plain Trainer.

Here are also the tests of ``shares`` and ``buckets``. Fits by themselves, resumed ones, and those
with several optimizers or averages of weights are in `test_sharded_optimizers.py`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_gpipe import GPipeStrategy
from tests.lightning.test_replicas import Halves
from tests.support.lightning_modules import Classifier, rows, trainer
from tests.support.processes import said
from tests.support.ranks import Pool, new_ranks
from tests.support.trainers import trainer_over

pytestmark = [
    pytest.mark.usefixtures("one_intra_op_thread"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
]

# The processes of a pipeline, the numbers of devices and machines, and of stages.
PLACES: dict[str, tuple[str, tuple[int, int], int]] = {
    "2x1": ("single", (4, 1), 2),
    "3x1": ("single", (6, 1), 2),
    "4x1": ("single", (8, 1), 2),
    "2x2": ("per_stage", (4, 1), 2),
    "2x2 nodes": ("per_node", (8, 4), 4),
    "3x2": ("per_stage", (6, 1), 2),
    "2x1 looped": ("single", (4, 1), 6),
    "2x2 looped": ("per_stage", (4, 1), 6),
}
BALANCES = {2: [3, 3], 4: [1, 2, 2, 1], 6: [1] * 6}


class Scale(nn.Module):
    """Uses its parameter in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((8,), 1.1, dtype=torch.float64))
        self.on = True

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale if self.on else x


class Drawn(Classifier):
    """Has a tied weight, parameters that some steps do not use, and a frozen one.

    It records the norms of the gradients before each step.
    """

    def __init__(self, optimizer: str, tied: str) -> None:
        super().__init__(optimizer)
        self.layers[3] = Scale()
        self.around = nn.Linear(8, 8).double()
        self.gain = nn.Parameter(torch.ones(8, dtype=torch.float64))
        self.layers[0].bias.requires_grad_(False)
        if tied != "no":
            self.layers[4].weight = self.get_parameter("layers.2.weight")
        if tied == "around":
            self.around.weight = self.get_parameter("layers.2.weight")
        self.norms: list[float] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.layers[3].__dict__["on"] = bool(batch_idx % 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        x = self.layers(x.double())
        x = x * self.gain if batch_idx == 0 else x
        return F.cross_entropy(self.head(self.around(x)), y)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        strategy: Any = self.trainer.strategy
        if isinstance(strategy, GPipeStrategy):
            norm = strategy.grad_norm(self)["grad_2.0_norm_total"]
        else:
            gradients = [x.grad for x in self.parameters() if x.grad is not None]
            norm = float(torch.nn.utils.get_total_norm(gradients))
        self.norms.append(norm)

    def configure_optimizers(self) -> Any:
        if self.hparams["optimizer"] == "adagrad":
            return torch.optim.Adagrad(self.parameters(), 0.05, weight_decay=0.01)
        return super().configure_optimizers()


class Rows(L.LightningDataModule):
    """Three batches of twelve rows, of which each replica gets its part."""

    def __init__(self, replicas: int) -> None:
        super().__init__()
        self.replicas = replicas

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        found, strategy, sampler = rows(36, seed=1), self.trainer.strategy, None
        if isinstance(strategy, GPipeStrategy):
            part = strategy.distributed_sampler_kwargs
            sampler = DistributedSampler[Any](found, shuffle=False, **part)
        return DataLoader(found, batch_size=12 // self.replicas, sampler=sampler)


@dataclass(frozen=True)
class Settings:
    """What a fit is drawn from."""

    place: str
    schedule: str
    optimizer: str
    tied: str
    sharding: str
    strategy: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def draw(cls, seed: int, places: list[str]) -> Settings:
        chance = random.Random(seed)
        place = chance.choice(places)
        schedules = ["fill_drain", "1f1b", "zero_bubble", "zero_bubble_v"]
        if PLACES[place][2] > 2:
            schedules.pop()  # it would need eight stages
        if PLACES[place][2] == 6:
            schedules.pop()  # it is for a device for each stage
        options: dict[str, Any] = {"accumulate_grad_batches": chance.choice([1, 2, 3])}
        if (clip := chance.choice([None, "norm", "value"])) is not None:
            options |= {"gradient_clip_val": 0.01, "gradient_clip_algorithm": clip}
        strategy: dict[str, Any] = {"ddp": chance.choice([None, {"bucket_cap_mb": 1e-4}])}
        if PLACES[place][0] != "single":
            strategy["outputs"] = chance.choice(["all", "last"])
        return cls(
            place,
            chance.choice(schedules),
            chance.choice(["adam", "momentum", "adagrad"]),
            chance.choice(["no", "stages", "around"]),
            chance.choice(["gradients", "parameters"]),
            strategy,
            options,
        )

    @property
    def replicas(self) -> int:
        return int(self.place[0])

    def fit(self, root: Path) -> dict[str, Any]:
        """The result of a fit in this process."""
        processes, machines, stages = PLACES[self.place]
        folded = self.schedule == "zero_bubble_v"
        strategy = {
            "replicas": self.replicas,
            "schedule": self.schedule,
            "sharding": self.sharding,
            "verify": False,
            "chunks": 4 if stages == 6 else 3,
            **self.strategy,
        }
        torch.manual_seed(0)
        model, data = Drawn(self.optimizer, self.tied), Rows(self.replicas)
        balance = BALANCES[4 if folded else stages]
        options = {"max_epochs": 2, **self.options}
        made = trainer_over(root, processes, balance, strategy, machines, **options)
        made.fit(model, datamodule=data)
        return result(model)

    def fit_plainly(self, root: Path) -> dict[str, Any]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = Drawn(self.optimizer, self.tied)
        trainer(root, **{"max_epochs": 2, **self.options}).fit(model, datamodule=Rows(1))
        return result(model)


def result(model: Drawn) -> dict[str, Any]:
    named = model.named_parameters()
    return {"parameters": {n: p.detach() for n, p in named if not p.is_meta}, "norms": model.norms}


def run(settings: Settings, root: Path) -> dict[str, Any]:
    return settings.fit(root)


def assert_trains_as_plain(settings: Settings, root: Path, ranks: Any) -> None:
    expected = settings.fit_plainly(root / "plain")

    everywhere = set[str]()
    for each in ranks.run(run, settings, root / "replicas"):
        if settings.sharding == "parameters":  # there is one replica with each in a stage only
            assert not everywhere & each["parameters"].keys() & {"layers.0.weight"}
        everywhere |= each["parameters"].keys()
        parameters = {name: expected["parameters"][name] for name in each["parameters"]}
        torch.testing.assert_close(each["parameters"], parameters, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(each["norms"], expected["norms"], rtol=1e-12, atol=1e-12)
    assert everywhere == expected["parameters"].keys()


# The last five have outputs="last" and a weight that is tied around the stages.
@pytest.mark.parametrize("seed", [*range(16), 115, 133, 151, 199, 208])
def test_drawn_settings(tmp_path: Path, two_ranks: Pool, four_ranks: Pool, seed: int) -> None:
    settings = Settings.draw(seed, ["2x1", "4x1", "2x2", "2x2 nodes"])

    assert_trains_as_plain(settings, tmp_path, two_ranks if settings.place == "2x1" else four_ranks)


@pytest.mark.parametrize("seed", range(40, 50))
def test_drawn_settings_with_three_stages_on_a_device(
    tmp_path: Path, two_ranks: Pool, four_ranks: Pool, seed: int
) -> None:
    settings = replace(Settings.draw(seed, ["2x1 looped", "2x2 looped"]), sharding="parameters")

    pool = two_ranks if settings.place.startswith("2x1") else four_ranks
    assert_trains_as_plain(settings, tmp_path, pool)


@pytest.mark.parametrize("place, seeds", [("3x1", range(20, 26)), ("3x2", range(30, 33))])
def test_three_replicas(tmp_path: Path, place: str, seeds: range) -> None:
    with new_ranks(3 if place == "3x1" else 6) as ranks:
        for seed in seeds:
            assert_trains_as_plain(Settings.draw(seed, [place]), tmp_path / str(seed), ranks)


# Memory.


def storages(tensors: list[Tensor]) -> int:
    """The bytes of the memory of some tensors, in which they may be together."""
    found = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(found.values())


class Memory(Callback):
    """Records the bytes of gradients and states after each backward, and those of parameters."""

    def __init__(self) -> None:
        self.gradients: list[int] = []
        self.states = 0
        self.parameters: list[int] = []

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        found = [x.grad for x in pl_module.parameters() if x.grad is not None]
        self.gradients.append(storages(found))

        self.parameters = [x.nbytes for x in pl_module.parameters() if not x.is_meta]

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        [optimizer] = trainer.optimizers
        states = (x for state in optimizer.state.values() for x in state.values())
        self.states = storages([x for x in states if x.numel() > 1])


def fit_measured(root: Path, place: str, schedule: str, sharding: str | None) -> Memory:
    processes, machines, stages = PLACES[place]
    strategy = {"replicas": int(place[0]), "schedule": schedule, "sharding": sharding}
    record = Memory()
    options = {"callbacks": [record], "max_epochs": 1, "accumulate_grad_batches": 3}
    made = trainer_over(root, processes, BALANCES[stages], strategy, machines, **options)
    made.fit(Classifier("adam"), datamodule=Rows(int(place[0])))
    return record


HEAD = [8 * 3 * 8, 3 * 8]  # bytes of the parameters around, which each replica has


@pytest.mark.parametrize("place", ["2x1", "3x1", "4x1", "2x2"])
@pytest.mark.parametrize("schedule", ["fill_drain", "1f1b"])
@pytest.mark.parametrize("sharding", ["gradients", "parameters"])
def test_bytes_of_gradients_and_states(
    tmp_path: Path, two_ranks: Pool, four_ranks: Pool, place: str, schedule: str, sharding: str
) -> None:
    replicas = int(place[0])
    if place == "3x1":
        with new_ranks(3) as ranks:
            found = ranks.run(fit_measured, tmp_path, place, schedule, sharding)
    else:
        pool = two_ranks if place == "2x1" else four_ranks
        found = pool.run(fit_measured, tmp_path, place, schedule, sharding)

    processes = len(found) // replicas
    for k in range(processes):  # the replicas of the same stages
        group = found[k::processes]
        everything = group[0].parameters
        if sharding == "parameters":  # each has those of its gradients, and what is around
            around = sum(HEAD)
            everything = HEAD + [x for each in group for x in each.parameters if x not in HEAD]
            for each in group:
                assert 0 <= sum(each.parameters) - each.gradients[0] <= around
        whole, largest = sum(everything), max(everything)
        shares = [each.gradients[0] for each in group]
        assert sum(shares) == whole
        assert max(shares) <= (whole + (replicas - 1) * largest) / replicas
        for share, each in zip(shares, group, strict=True):
            assert each.gradients == [share] * 3  # also while gradients accumulate
            assert each.states == 2 * share


def test_bytes_without_shares(tmp_path: Path, two_ranks: Pool) -> None:
    for each in two_ranks.run(fit_measured, tmp_path, "2x1", "1f1b", None):
        assert each.gradients[-1] == sum(each.parameters)


# Steps that are skipped, and what else is decided by all.


class Overflowing(Classifier):
    """Has an infinite gradient of one parameter, which one replica owns, in the second step."""

    def __init__(self) -> None:
        super().__init__()
        self.head.bias.register_hook(self._overflow)
        self.scales: list[float] = []
        self.steps = 0

    def _overflow(self, gradient: Tensor) -> Tensor:
        self.steps += 1
        return gradient * float("inf") if self.steps == 2 else gradient

    def on_train_batch_end(self, *_: Any) -> None:
        scaler: Any = self.trainer.precision_plugin.scaler  # type: ignore[attr-defined]
        self.scales.append(scaler.get_scale())


def fit_scaled(root: Path, sharding: str | None) -> tuple[list[float], dict[str, Tensor]]:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    plugins = [MixedPrecision("16-mixed", "cpu", scaler)]
    strategy = {"replicas": 2, "sharding": sharding}
    options = {"plugins": plugins, "max_epochs": 2, "gradient_clip_val": 0.05}
    made = trainer_over(root, "single", [3, 3], strategy, (4, 1), **options)
    torch.manual_seed(0)
    model = Overflowing()
    made.fit(model, datamodule=Halves(2))
    return model.scales, {n: x.detach() for n, x in model.named_parameters()}


def test_step_that_one_replica_must_skip(tmp_path: Path, two_ranks: Pool) -> None:
    whole, divided = (
        two_ranks.run(fit_scaled, tmp_path, sharding) for sharding in (None, "gradients")
    )

    for (scales, weights), (other_scales, other_weights) in zip(whole, divided, strict=True):
        assert scales == other_scales and scales[:2] == [64.0, 32.0]
        torch.testing.assert_close(weights, other_weights, rtol=1e-12, atol=1e-12)


# What is refused.


class Around(Classifier):
    """Computes gradients without the Trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        F.cross_entropy(self(batch[0]), batch[1]).backward()
        optimizer.step()


class Sparse(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4, 8, sparse=True)


class Logging(Classifier):
    """Logs the norms of the gradients of one replica."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, 2.0))


def refused(root: Path, build: Any) -> str:
    strategy = {"replicas": 2, "sharding": "gradients"}
    made = trainer_over(root, "single", [3, 3], strategy, (4, 1))
    return said(lambda: made.fit(build(), datamodule=Halves(2)))


@pytest.mark.parametrize(
    "build, message",
    [
        (Around, "so it is no average. Compute gradients by self.manual_backward(loss)"),
        (Sparse, "must be dense: got words with sparse=True"),
        (Logging, "Write self.trainer.strategy.grad_norm(self)"),
    ],
)
def test_what_is_refused(tmp_path: Path, build: Any, message: str) -> None:
    with new_ranks(2) as ranks:
        for error in ranks.run(refused, tmp_path, build):
            assert message in error
