"""The processes of one pipeline count as one: for rows, worker seeds, attributes, metrics.

Here are also the tests of ``data_parallel``.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.distributed import get_world_size
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Subset,
)
from torchmetrics import MeanMetric, SumMetric

from lightning_gpipe.distributed import refuse_world_size
from tests.support.lightning_modules import Classifier, Data, rows, trainer
from tests.support.ranks import Pool, new_ranks
from tests.support.trainers import trainer_over

pytestmark = [
    pytest.mark.usefixtures("one_intra_op_thread"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`"),
]


# Rows that are divided by the number of processes.


class Part(IterableDataset[Any]):
    """Every nth row."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def __iter__(self) -> Iterator[Any]:
        return iter([self.rank])


def sampled(loader: int) -> DataLoader[Any]:
    data = rows(8, seed=1)
    sampler = DistributedSampler[Any](data, num_replicas=4, rank=1)
    if loader == 0:
        return DataLoader(data, sampler=sampler)
    if loader == 1:
        return DataLoader(data, batch_sampler=BatchSampler(sampler, 2, drop_last=False))
    return DataLoader(Part(1, 4))


@pytest.mark.parametrize("loader", [0, 1, 2])
def test_part_of_the_rows_by_the_number_of_processes(loader: int) -> None:
    with pytest.raises(ValueError, match=r"=4 for 2 in 4 processes\. Write \w+=trainer\.strategy"):
        refuse_world_size(sampled(loader), world_size=4, replicas=2)

    refuse_world_size(sampled(loader), world_size=4, replicas=4)
    refuse_world_size(sampled(loader), world_size=8, replicas=4)


def test_part_of_a_dataset_of_hugging_face() -> None:
    """``split_dataset_by_node`` keeps both numbers in a part of the dataset."""
    dataset = SimpleNamespace(_distributed=SimpleNamespace(rank=0, world_size=2))

    with pytest.raises(ValueError, match="got SimpleNamespace with world_size=2 for 1 in 2"):
        refuse_world_size(SimpleNamespace(dataset=dataset), world_size=2, replicas=1)


def test_unrelated_number_of_a_dataset() -> None:
    """A world of two squares is no part of anything."""
    refuse_world_size(SimpleNamespace(dataset=SimpleNamespace(world_size=2)), 2, 1)


def fit_sampler(root: Path) -> str:
    made = trainer_over(root, "per_stage", [2, 4], {})
    data = rows(8, seed=1)
    with pytest.raises(ValueError) as error:
        made.fit(Classifier(), DataLoader(data, sampler=DistributedSampler[Any](data, 2, 0)))
    return str(error.value)


def test_sampler_of_a_fit(tmp_path: Path) -> None:
    with new_ranks(2) as ranks:
        found = ranks.run(fit_sampler, tmp_path)

    assert all(each.startswith("rows must be divided by the number of pipelines") for each in found)


class Stream(IterableDataset[Any]):
    """Rows, of which each process would take some.

    Args:
        count: Returns the number of processes.
    """

    def __init__(self, count: Callable[[], int]) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        count = self.count()
        for x in torch.ones(4 * count, 6, dtype=torch.float64):
            yield x, 1


class Halved(L.LightningDataModule):
    """Rows, of which a subset is chosen before they are loaded."""

    def train_dataloader(self) -> Any:
        return DataLoader(Subset(rows(8, seed=1), range(0, 8, dist.get_world_size())), batch_size=2)


def fit_stream(root: Path, kind: str) -> list[str]:
    """The warnings of a fit."""
    made = trainer_over(root, "per_stage", [2, 4], {}, max_epochs=2)
    counts: dict[str, Callable[[], int]] = {
        "stream": get_world_size,
        "trainer": lambda: made.world_size,
        "variable": lambda: int(os.environ["WORLD_SIZE"]),
        "variable, if set": lambda: int(os.environ.get("WORLD_SIZE", 1)),
    }
    data: Any = DataLoader(Stream(counts[kind]), batch_size=4) if kind in counts else Halved()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        made.fit(Classifier(), data)
    strategy: Any = made.strategy
    assert (strategy.data_parallel_size, strategy.data_parallel_rank) == (1, 0)
    assert get_world_size() == int(os.environ["WORLD_SIZE"])  # which chooses no rows
    return [str(each.message) for each in found if "where rows are chosen" in str(each.message)]


NAMES = {
    "stream": "torch.distributed.get_world_size()",
    "trainer": "trainer.world_size",
    "variable": "the variable WORLD_SIZE",
    "variable, if set": "the variable WORLD_SIZE",
    "hook": "torch.distributed.get_world_size()",
}


@pytest.mark.parametrize("kind", NAMES)
def test_number_of_processes_where_rows_are_chosen(
    tmp_path: Path, two_ranks: Pool, kind: str
) -> None:
    first, second = two_ranks.run(fit_stream, tmp_path, kind)

    (message,) = first
    assert message.startswith(f"{NAMES[kind]} is the number of processes")
    assert f"{Path(__file__).name}:" in message
    assert "trainer.strategy.data_parallel_size, which is 1" in message
    assert second == []  # rank 0 warns for all


# Loaders.


class Drawn(Dataset[Any]):
    """Rows that workers draw."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, k: int) -> Any:
        x = torch.rand(6, dtype=torch.float64) + np.random.rand() + random.random()
        return x, k % 3


class Seen(Callback):
    """The batches."""

    def __init__(self) -> None:
        self.batches: list[Tensor] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.batches.append(args[2][0])


def fit_seeded(root: Path, processes: str) -> Any:
    L.seed_everything(7, workers=True, verbose=False)
    process: Any = multiprocessing.current_process()
    process._config["daemon"] = False  # a rank's loader may have a worker
    seen = Seen()
    options: dict[str, Any] = {"callbacks": [seen], "max_epochs": 2}
    if processes == "plain":
        made = trainer(root, **options)
    else:
        made = trainer_over(root, processes, [2, 4], {}, **options)
    # Forked, as a user's: a rank's own way would start another server, which imports all again.
    workers: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork"}
    made.fit(Classifier(), DataLoader(Drawn(), batch_size=3, **workers))
    return seen.batches


def test_seeds_of_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "0")  # restored after the test
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        expected = fit_seeded(tmp_path, "plain")
    random.setstate(states[0])
    np.random.set_state(states[1])

    with new_ranks(2) as ranks:
        results = ranks.run(fit_seeded, tmp_path, "per_stage")

    for found in results:
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def collate(batch: Any) -> Any:
    return torch.utils.data.default_collate(batch)


class Asking(Callback):
    """Looks at the Trainer's loader."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        self.found: list[Any] = []

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        shared: Any = trainer.train_dataloader
        shared.multiprocessing_context = None
        with pytest.raises(AttributeError, match="'DataLoader' object has no attribute 'batches'"):
            _ = shared.batches
        assert shared is not self.loader
        self.found = [isinstance(shared, DataLoader), shared.collate_fn is collate]
        self.found += [shared.batch_size, shared.num_workers, shared.drop_last, len(shared)]


def ask(root: Path) -> Any:
    """What a fit says of its loader."""
    loader = DataLoader(rows(8, seed=1), batch_size=4, collate_fn=collate)
    asking = Asking(loader)
    made = trainer_over(root, "per_stage", [2, 4], {}, max_epochs=1, callbacks=[asking])
    made.fit(Classifier(), loader)
    assert made.train_dataloader is loader
    return asking.found


def test_attributes_of_a_loader(tmp_path: Path, two_ranks: Pool) -> None:
    found = two_ranks.run(ask, tmp_path)

    assert found == [[True, True, 4, 0, False, 2]] * 2


def evaluate(root: Path) -> int:
    """Use the same loaders twice."""
    made = trainer_over(root, "per_stage", [2, 4], {})
    loaders = CombinedLoader([DataLoader(rows(8, seed=1), batch_size=4)], "sequential")
    model = Classifier()
    for _ in range(2):
        made.validate(model, loaders, verbose=False)
    return len(made.predict(model, loaders) or [])


def test_loaders_of_several_runs(tmp_path: Path, two_ranks: Pool) -> None:
    assert two_ranks.run(evaluate, tmp_path) == [2, 2]


# Metrics.


class Counting(Callback):
    """Holds metrics, one of which it makes as late as it can."""

    def __init__(self) -> None:
        self.count = SumMetric()
        self.means: dict[str, MeanMetric] = {}
        self.found: list[float] = []

    def on_validation_batch_end(self, *args: Any) -> None:
        x, y = args[3]
        self.count.update(len(x))
        self.means.setdefault("y", MeanMetric()).update(y.float())

    def on_validation_epoch_end(self, *args: Any) -> None:
        metrics = self.count, *self.means.values()
        self.found += [float(metric.compute()) for metric in metrics]
        for metric in metrics:
            metric.reset()


def count(root: Path, processes: str, replicas: int = 1) -> list[float]:
    counting = Counting()
    if processes == "plain":
        made = trainer(root, callbacks=[counting])
    else:
        machines = (2 * replicas, 1)
        options = {"replicas": replicas}
        made = trainer_over(root, processes, [2, 4], options, machines, callbacks=[counting])
    made.validate(Classifier(), DataLoader(rows(8, seed=2), batch_size=2), verbose=False)
    return counting.found


@pytest.mark.filterwarnings("ignore:Using `DistributedSampler` with the dataloaders")
@pytest.mark.parametrize("replicas", [1, 2])
def test_metrics_of_a_callback(
    tmp_path: Path, two_ranks: Pool, four_ranks: Pool, replicas: int
) -> None:
    """They counted each row once for each process of a pipeline."""
    expected = count(tmp_path, "plain")

    pool = two_ranks if replicas == 1 else four_ranks
    found = pool.run(count, tmp_path, "per_stage", replicas)

    assert found == [expected] * (2 * replicas)


def test_metrics_after_a_fit(tmp_path: Path) -> None:
    """In new processes: a fit that loses one ends collectives of all, also those of later tests."""
    with new_ranks(2) as ranks:
        assert ranks.run(synced_after_a_fit, tmp_path) == [2.0, 2.0]


def synced_after_a_fit(root: Path) -> float:
    """What a metric of both processes counts when no pipeline is there."""
    trainer_over(root, "per_stage", [2, 4], {}, max_epochs=1).fit(Classifier(), datamodule=Data())
    metric = SumMetric()
    metric.update(1)
    return float(metric.compute())
