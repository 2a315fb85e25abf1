"""Gradients of stages leave early: averages over replicas begin while other stages run backward.

The interface, ``gradient_home``, and what asks for averages, ``gradient_averaging``, have their
tests here, too. That replicas train as a plain Trainer on the whole batch, is proven in
`test_replicas.py` and `test_schedules_over_processes.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader, Dataset

from lightning_gpipe.core.schedules import Kind
from lightning_gpipe.distributed import GradientAverages, Shares
from tests.lightning.test_replicas import PLACES, Halves
from tests.support.lightning_modules import Classifier, rows, six_layers
from tests.support.ranks import Pool, group_of, new_ranks
from tests.support.trainers import trainer_over

pytestmark = [
    pytest.mark.usefixtures("one_intra_op_thread"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
]

AT_THE_END = {"find_unused_parameters": True}  # DistributedDataParallel averages all gradients


class Whole(L.LightningModule):
    """Everything is in the pipeline, with a batch norm and a parameter that no layer uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = six_layers().append(nn.Linear(8, 3))
        self.layers[1] = nn.BatchNorm1d(8)
        self.layers[3].unused = nn.Parameter(torch.ones(2))
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.cross_entropy(self.layers(x.double()), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.01)


class Penalised(Classifier):
    """Uses parameters of layers around the pipeline: before it, after it, and in a penalty."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        weights = [layer.weight for layer in self.layers if isinstance(layer, nn.Linear)]
        x = x.double() + weights[0].sum() * x.mean()
        output = self.head(self.layers(x)) + weights[1][0, :3] * x.sum()
        return F.cross_entropy(output, y) + weights[2].square().sum() * x.std()


class Lopsided(Classifier):
    """Uses a parameter of a layer around the pipeline in one replica only."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        penalty = sum(weight.square().sum() for weight in self.layers[4].parameters())
        return loss + penalty if dist.get_rank() == 0 else loss


class Turns(Classifier):
    """Calls the pipeline once, twice, or not at all, by the step and the replica."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        times = (batch_idx + dist.get_rank()) % 3
        outputs = [self(x * (k + 1)) for k in range(times)] or [
            self.head(x.new_zeros(1, 8).double())
        ]
        return F.cross_entropy(torch.cat(outputs), torch.cat([y] * times) if times else y[:1])


class Hooked(Classifier):
    """Clips gradients before they are averaged, and again when they are added up."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.layers[0].parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        for parameter in self.layers[4].parameters():
            parameter.register_post_accumulate_grad_hook(_clamp)


def _clamp(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-1e-3, 1e-3)


class Weighted(Classifier):
    """Has weights of losses that differ between micro-batches, and between replicas."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return {"loss": F.cross_entropy(self(x), y), "loss_weight": float(x.abs().sum())}


class Unequal(Classifier):
    """Uses a parameter of a layer in one replica only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2] = Sometimes()


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((8,), 1.1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale if dist.get_rank() == 0 else x


MODELS: dict[str, Callable[[], L.LightningModule]] = {
    "classifier": Classifier,
    "whole": Whole,
    "penalised": Penalised,
    "lopsided": Lopsided,
    "turns": Turns,
    "hooked": Hooked,
    "weighted": Weighted,
    "unequal": Unequal,
}


def balance_of(name: str, place: str, schedule: str) -> list[int]:
    layers = 7 if name == "whole" else 6
    stages = 2 * (1 + (schedule == "zero_bubble_v")) if place != "2x2 nodes" else 4
    return [layers // stages + (k >= stages - layers % stages) for k in range(stages)]


def fit(
    root: Path,
    place: str,
    schedule: Any,
    name: str,
    ddp: Any,
    options: dict[str, Any],
    sharding: str | None = None,
) -> tuple[dict[str, Tensor], bool]:
    """The values in this process after a fit of two replicas, and whether gradients left early."""
    torch.manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        model = MODELS[name]()
    processes, _, machines = PLACES[place]
    strategy = {"chunks": 4, "replicas": 2, "schedule": schedule, "ddp": ddp, "verify": False}
    strategy["sharding"] = sharding
    record = Record()
    made = trainer_over(
        root,
        processes,
        balance_of(name, place, schedule),
        strategy,
        machines,
        callbacks=[record],
        limit_val_batches=0,
        max_epochs=1,
        **options,
    )
    made.fit(model, datamodule=Halves(2))
    state = {n: x.detach() for n, x in model.state_dict().items() if not x.is_meta}
    return state, Kind.GRADIENTS in record.kinds


class Record(Callback):
    """Records the kinds of actions that run."""

    def __init__(self) -> None:
        self.kinds: set[Kind] = set()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        timeline = trainer.strategy.pipeline.only.engine.timeline  # type: ignore[attr-defined]
        if timeline is not None:
            self.kinds.update(action.kind for _, action, *_ in timeline.records)


# In two processes, each with all stages of a replica, and in four.
CASES: list[tuple[str, str, str, dict[str, Any]]] = [
    ("2x1", "fill_drain", "classifier", {"accumulate_grad_batches": 2}),
    ("2x1", "fill_drain", "whole", {"accumulate_grad_batches": 3}),
    ("2x1", "1f1b", "whole", {"gradient_clip_val": 0.05}),
    ("2x1", "zero_bubble_v", "classifier", {"precision": "bf16-mixed"}),
    ("2x1", "fill_drain", "penalised", {"accumulate_grad_batches": 2}),
    ("2x1", "1f1b", "penalised", {"accumulate_grad_batches": 2}),
    ("2x1", "fill_drain", "lopsided", {"accumulate_grad_batches": 2}),
    ("2x1", "1f1b", "lopsided", {}),
    ("2x1", "fill_drain", "turns", {}),
    ("2x1", "fill_drain", "hooked", {}),
    ("2x1", "zero_bubble", "hooked", {}),
    ("2x1", "fill_drain", "unequal", {}),
    ("2x1", "1f1b", "unequal", {"accumulate_grad_batches": 2}),
    ("2x1", "1f1b", "weighted", {"accumulate_grad_batches": 2}),
    ("2x2", "fill_drain", "whole", {"gradient_clip_val": 0.05}),
    ("2x2", "1f1b", "classifier", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}),
    ("2x2", "zero_bubble", "whole", {"accumulate_grad_batches": 2}),
    ("2x2", "zero_bubble_v", "classifier", {}),
    ("2x2 nodes", "1f1b", "weighted", {"precision": "bf16-mixed"}),
    ("2x2 nodes", "fill_drain", "whole", {"accumulate_grad_batches": 2}),
]


@pytest.mark.parametrize(
    "place, schedule, name, options",
    CASES,
    ids=[f"{place}, {schedule}, {name}, {k}" for k, (place, schedule, name, _) in enumerate(CASES)],
)
def test_early_and_late_averages_are_equal(
    tmp_path: Path,
    two_ranks: Pool,
    four_ranks: Pool,
    place: str,
    schedule: str,
    name: str,
    options: dict[str, Any],
) -> None:
    ranks = two_ranks if place == "2x1" else four_ranks

    early, late = (
        ranks.run(fit, tmp_path, place, schedule, name, ddp, options) for ddp in (None, AT_THE_END)
    )

    for (one, left_early), (other, left_late) in zip(early, late, strict=True):
        assert left_early and not left_late
        if name in ("lopsided", "turns"):  # the sum over the replicas is the last there, not here
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)
        else:
            assert one and [key for key, x in one.items() if not torch.equal(x, other[key])] == []


@pytest.mark.parametrize(
    "place, schedule, name, options",
    [
        ("2x1", "fill_drain", "whole", {"accumulate_grad_batches": 3}),
        ("2x1", "fill_drain", "penalised", {"accumulate_grad_batches": 2}),
        ("2x1", "1f1b", "penalised", {}),
        ("2x1", "fill_drain", "lopsided", {"accumulate_grad_batches": 2}),
        ("2x1", "1f1b", "lopsided", {"accumulate_grad_batches": 2}),
        ("2x1", "fill_drain", "turns", {}),
        ("2x1", "zero_bubble", "hooked", {}),
        ("2x1", "1f1b", "unequal", {"accumulate_grad_batches": 2}),
        ("2x1", "fill_drain", "unequal", {}),
        ("2x2", "1f1b", "weighted", {"accumulate_grad_batches": 2}),
        ("2x2", "zero_bubble_v", "classifier", {"precision": "bf16-mixed"}),
        ("2x2 nodes", "fill_drain", "whole", {"gradient_clip_val": 0.05}),
    ],
)
def test_averages_in_one_replica_each(
    tmp_path: Path,
    two_ranks: Pool,
    four_ranks: Pool,
    place: str,
    schedule: str,
    name: str,
    options: dict[str, Any],
) -> None:
    ranks = two_ranks if place == "2x1" else four_ranks

    everywhere, divided = (
        ranks.run(fit, tmp_path, place, schedule, name, None, options, sharding)
        for sharding in (None, "gradients")
    )

    for (one, _), (other, left_early) in zip(everywhere, divided, strict=True):
        assert left_early
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def test_memory_of_gradients_is_free_once_they_are_in_a_bucket(two_ranks: Pool) -> None:
    for alive in two_ranks.run(gradients_alive):
        assert alive == [4, 3, 2, 1, 0]


def gradients_alive() -> list[int]:
    """The numbers of a stage's gradients that are alive when one bucket after another is summed."""
    group = group_of(2)
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(5)]
    shares = Shares(group, parameters)
    nobody: Any = None  # watches over the processes
    averages = GradientAverages({0: parameters}, group, nobody, 1.0, shares=shares)
    pairs: list[tuple[Tensor, Tensor]] = [(parameter, torch.ones(3)) for parameter in parameters]
    gradients = [weakref.ref(gradient) for _, gradient in pairs]
    alive, reduce = [], dist.reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        alive.append(sum(gradient() is not None for gradient in gradients))
        return reduce(*args, **kwargs)

    with averages.averaging(), patch.object(dist, "reduce", counted):
        transfer = averages.begin()
        assert transfer is not None
        transfer.open()
        assert transfer.send(0, pairs) == []
        own = transfer.receive()
    averages.finish()
    assert all(shares.is_own(leaf) and x.tolist() == [1.0] * 3 for leaf, x in own)
    return alive


# That they begin early, and what else ends a step.


class Rows(Dataset[Any]):
    """Two batches in each replica, of 6 rows or 3, which are 4 micro-batches or 3."""

    def __init__(self) -> None:
        self.batch_size = 3 if replica() else 6
        self.micro_batches = min(self.batch_size, 4)
        self._rows = rows(2 * self.batch_size, seed=replica())

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, k: int) -> Any:
        return self._rows[k]


def replica() -> int:
    return dist.get_rank() * 2 // dist.get_world_size()


def fit_unequal(
    root: Path, place: str, schedule: Any, at_last_backward: Callable[..., None]
) -> int:
    """Fit, and call a function in the last backward of the first stage, with the step's number."""
    processes, balance, machines = PLACES[place]
    strategy = {"chunks": 4, "replicas": 2, "schedule": schedule, "verify": False}
    options = {"max_epochs": 1, "use_distributed_sampler": False}
    made = trainer_over(root, processes, balance, strategy, machines, **options)
    model, data, backwards = Classifier(), Rows(), count(1)

    def hook(*_: Any) -> None:
        if next(backwards) % data.micro_batches == 0:
            at_last_backward(made.global_step)

    model.layers[0].register_full_backward_hook(hook)
    all_reduce = dist.all_reduce

    def telling(tensor: Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        last = not next(model.layers[4].parameters()).is_meta
        if async_op and last:  # the collectives of the last stage are the first
            store().set(f"{place} {schedule} {replica()} {made.global_step}", "begun")
        kwargs["async_op"] = async_op
        return all_reduce(tensor, *args, **kwargs)

    with patch.object(dist, "all_reduce", telling):
        made.fit(model, DataLoader(data, batch_size=data.batch_size))
    return made.global_step


def store() -> Any:
    return dist.distributed_c10d._get_default_store()


def fit_waiting(root: Path, place: str, schedule: Any) -> int:
    """Fit, where the last backward of the first stage waits for the last stage's collective."""

    def wait(step: int) -> None:
        store().wait([f"{place} {schedule} {replica()} {step}"], timedelta(seconds=20))

    return fit_unequal(root, place, schedule, wait)


@pytest.mark.parametrize("place", ["2x1", "2x2"])
@pytest.mark.parametrize("schedule", ["fill_drain", "1f1b"])
def test_averaging_begins_beside_backwards(
    tmp_path: Path, two_ranks: Pool, four_ranks: Pool, place: str, schedule: str
) -> None:
    ranks = two_ranks if place == "2x1" else four_ranks

    assert set(ranks.run(fit_waiting, tmp_path, place, schedule)) == {2}


def fit_raising(root: Path, place: str, schedule: Any) -> str:
    """A fit of which one replica fails when its last stage's gradients have left."""

    def fail(step: int) -> None:
        if step == 1 and replica():
            raise KeyError("a hook")

    with pytest.raises((KeyError, RuntimeError)) as error:
        fit_unequal(root, place, schedule, fail)
    return f"{type(error.value).__name__}: {error.value}"


@pytest.mark.parametrize(
    "place, schedule", [("2x1", "1f1b"), ("2x2", "fill_drain"), ("2x2", "zero_bubble")]
)
def test_replica_that_fails_while_averages_are_awaited(
    tmp_path: Path, place: str, schedule: str
) -> None:
    size = 2 if place == "2x1" else 4
    with new_ranks(size) as ranks:
        found = ranks.run(fit_raising, tmp_path, place, schedule)

    failing = size // 2
    assert found.pop(failing) == "KeyError: 'a hook'"
    for each in found:
        assert each.startswith("RankFailed: ") and f"rank {failing}" in each and "a hook" in each


# What is refused.


class HookInTime(Callback):
    def on_fit_start(self, trainer: L.Trainer, *_: Any) -> None:
        register_hook(trainer)


class LateHook(Callback):
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        register_hook(trainer)


def register_hook(trainer: Any) -> None:
    trainer.model.register_comm_hook(trainer.strategy._processes.across, allreduce_hook)


def fit_with_hook(root: Path, callback: Callback) -> str:
    strategy, record = {"replicas": 2, "verify": False}, Record()
    made = trainer_over(root, "single", [2, 4], strategy, (4, 1), callbacks=[callback, record])
    try:
        made.fit(Classifier(), datamodule=Halves(2))
    except RuntimeError as error:
        return str(error)
    return f"early: {Kind.GRADIENTS in record.kinds}"


def test_communication_hook_keeps_gradients(tmp_path: Path, two_ranks: Pool) -> None:
    assert two_ranks.run(fit_with_hook, tmp_path, HookInTime()) == ["early: False"] * 2


def test_communication_hook_that_comes_late(tmp_path: Path) -> None:
    with new_ranks(2) as ranks:
        found = ranks.run(fit_with_hook, tmp_path, LateHook())

    assert all("must be registered in on_fit_start" in each for each in found)
