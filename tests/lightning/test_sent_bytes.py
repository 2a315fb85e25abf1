"""What each process sends in a step, and with how many it is connected.

With ``outputs="last"`` that does not depend on the size of the output; with ``"all"`` it does.
"""

import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.lightning_modules import Data
from tests.support.ranks import new_ranks
from tests.support.sockets import connections, sent_bytes
from tests.support.trainers import trainer_over

pytestmark = [
    pytest.mark.usefixtures("one_intra_op_thread"),
    pytest.mark.skipif(sys.platform != "linux", reason="counted by the kernel of Linux"),
]

WIDTH = 8
ROWS = 6  # at least, in a batch
SMALL, LARGE = 4, 2**17  # the numbers of an output's row
LITTLE = 16_000  # bytes


class Wide(nn.Module):
    """The last layer, with so many numbers for each row."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(numbers, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, WIDTH) to (rows, numbers)."""
        return x.mean(-1, keepdim=True) * self.weight


class Growing(L.LightningModule):
    """A chain whose output is small or large."""

    def __init__(self, stages: int, numbers: int) -> None:
        super().__init__()
        first = nn.Linear(6, WIDTH)
        more = [nn.Linear(WIDTH, WIDTH) for _ in range(stages - 2)]
        self.layers = nn.Sequential(first, *more, Wide(numbers)).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.layers(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Counter(Callback):
    """Counts what has been sent after each step."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.sent.append(sent_bytes())


class Count(NamedTuple):
    """What a process sends in a step, in bytes, and the connections of a fit."""

    bytes: int
    connections: int


def count(root: Path, stages: int, numbers: int, options: dict[str, Any]) -> Count:
    torch.manual_seed(0)
    model, counter, before = Growing(stages, numbers), Counter(), len(list(connections()))
    made = trainer_over(
        root,
        "per_stage",
        [1] * stages,
        {"chunks": 2, **options},
        (stages, 1),
        callbacks=[counter],
        max_epochs=2,
    )
    made.fit(model, datamodule=Data())
    # Others have a heartbeat in them, or what is sent once in an epoch.
    least = min(after - before for before, after in pairwise(counter.sent))
    return Count(least, len(list(connections())) - before)


def counts(root: Path, stages: int, numbers: int, **options: Any) -> Sequence[Count]:
    with new_ranks(stages) as ranks:
        return ranks.run(count, root, stages, numbers, options)


@pytest.mark.parametrize("schedule", ["fill_drain", "1f1b"])
def test_output_of_the_last_stage_is_not_sent(tmp_path: Path, schedule: str) -> None:
    """A step's batch, loss and logs go from the first process to its neighbours in a tree."""
    for stages, numbers in [(2, SMALL), (2, LARGE), (4, LARGE)]:
        found = counts(tmp_path, stages, numbers, schedule=schedule, outputs="last")
        assert all(each.bytes < LITTLE for each in found), (stages, numbers, found)


def test_output_for_all_is_sent_to_all(tmp_path: Path) -> None:
    *_, last = counts(tmp_path, 3, LARGE, outputs="all")

    assert last.bytes > ROWS * LARGE * 8  # of float64


def test_processes_are_connected_with_those_they_talk_to(tmp_path: Path) -> None:
    """Neighbours in the pipeline, and in the tree, whose first process has all others below it."""
    first, *others = counts(tmp_path, 6, SMALL, outputs="last")

    assert first.connections <= 2 * 5  # of the pipeline, and of the Trainer
    assert all(each.connections <= 2 * 3 for each in others)


# Parameters around the pipeline.

TOKENS = 2**14  # of a vocabulary, whose embedding has 1 MB
EMBEDDING = TOKENS * WIDTH * 8  # bytes


class Embedded(Growing):
    """An embedding before a chain, and a head as large after it, which may be tied."""

    def __init__(self, stages: int, tied: bool) -> None:
        super().__init__(stages, WIDTH)
        self.embedding = nn.Embedding(TOKENS, WIDTH).double()
        self.head = nn.Linear(WIDTH, TOKENS, bias=False).double()
        if tied:
            self.head.weight = self.embedding.weight
        self.layers[0] = nn.Linear(WIDTH, WIDTH).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.embedding(batch[1])
        return self.head(self.layers(x)).logsumexp(-1).mean()


def embedded(root: Path, stages: int, tied: bool, options: dict[str, Any]) -> tuple[int, float]:
    """The fewest bytes that are sent in a step, and their mean."""
    torch.manual_seed(0)
    counter = Counter()
    made = trainer_over(
        root,
        "per_stage",
        [1] * stages,
        {"chunks": 2, "outputs": "last", **options},
        (stages, 1),
        callbacks=[counter],
        max_epochs=2,
    )
    made.fit(Embedded(stages, tied), datamodule=Data())
    sent = [after - before for before, after in pairwise(counter.sent)]
    return min(sent), sum(sent) / len(sent)


@pytest.mark.parametrize("schedule", ["fill_drain", "1f1b"])
@pytest.mark.parametrize("tied", [False, True])
def test_embedding_is_sent_between_two_processes(tmp_path: Path, schedule: str, tied: bool) -> None:
    """Its gradient goes to the first process, and comes back if it has a part in it."""
    with new_ranks(4) as ranks:
        last, *inner, first = ranks.run(embedded, tmp_path, 4, tied, {"schedule": schedule})

    # Some of what a process sends is counted in the next step.
    assert all(least < LITTLE for least, _ in inner)
    assert 0.7 < first[1] / EMBEDDING < 1.3
    assert 0.7 < last[1] / EMBEDDING < 1.3 if tied else last[0] < LITTLE


# Batches.

WORDS = 2**14  # of a row
BATCH = 8 * WORDS * 8  # bytes


class Setting(Growing):
    """Sets an attribute of a layer in each step, so that all processes run it up to its call."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        vars(self.layers[1])["step"] = float(batch_idx)
        return super().training_step(batch, batch_idx)


class Changing(Setting):
    """Has a hook that changes batches, so that all processes have them."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + 1, batch[1]]


def with_batches(root: Path, kind: type[Growing]) -> float:
    """The mean of the bytes that are sent in a step."""
    torch.manual_seed(0)
    counter, model = Counter(), kind(3, SMALL)
    strategy = {"chunks": 2, "outputs": "last", "verify": False}
    made = trainer_over(
        root, "per_stage", [1, 1, 1], strategy, (3, 1), callbacks=[counter], max_epochs=1
    )
    data = TensorDataset(torch.ones(64, 6).double(), torch.ones(64, WORDS).double())
    made.fit(model, DataLoader(data, batch_size=8))
    return (counter.sent[-1] - counter.sent[0]) / (len(counter.sent) - 1)


@pytest.mark.parametrize("kind, times", [(Growing, 1), (Setting, 2), (Changing, 2)])
def test_batch_is_sent_once_to_each_process_that_needs_it(
    tmp_path: Path, kind: type[Growing], times: int
) -> None:
    """Once it was handed again to those that had it."""
    with new_ranks(3) as ranks:
        last, inner, first = ranks.run(with_batches, tmp_path, kind)

    assert times - 0.3 < last / BATCH < times + 0.3
    assert inner + first < LITTLE


def sent_in_fit(root: Path, stages: int) -> int:
    """The bytes that are sent from the beginning of a fit until its last step has ended."""
    torch.manual_seed(0)
    counter, before = Counter(), sent_bytes()
    made = trainer_over(
        root,
        "per_stage",
        [1] * stages,
        {"chunks": 2, "outputs": "all"},
        (stages, 1),
        callbacks=[counter],
        max_epochs=2,
    )
    made.fit(Embedded(stages, tied=False), datamodule=Data())
    return counter.sent[-1] - before


def test_embedding_that_is_equal_in_all_processes_is_not_sent(tmp_path: Path) -> None:
    """Neither its values when a fit begins, nor its gradients, which all processes compute."""
    with new_ranks(4) as ranks:
        found = ranks.run(sent_in_fit, tmp_path, 4)

    assert max(found) < EMBEDDING / 4, found
