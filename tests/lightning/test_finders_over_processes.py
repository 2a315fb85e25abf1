"""Callbacks that try learning rates and batch sizes find the same over several processes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.support.lightning_modules import Classifier, rows, six_layers, trainer
from tests.support.ranks import Pool
from tests.support.trainers import trainer_over

pytestmark = [
    pytest.mark.usefixtures("one_intra_op_thread"),
    pytest.mark.filterwarnings("ignore:Unable to suggest"),
]

LIMIT = 9  # rows that the memory has room for


class Small:
    """A memory that has no room for larger batches at one place of a step.

    Args:
        place: The place.
        rank: The process that has it; None for all.
    """

    def __init__(self, place: str, rank: int | None) -> None:
        self._place = place
        self._rank = rank
        self._batch = 0

    def come_to(self, place: str, model: Classifier, batch: int | None = None) -> None:
        self._batch = batch or self._batch
        here = self._rank is None or model.trainer.global_rank == self._rank
        if here and place == self._place and self._batch > LIMIT:
            raise torch.OutOfMemoryError("CUDA out of memory.")


class Remembering(nn.Module):
    """A layer that needs memory."""

    def __init__(self, memory: Small, owner: list[Classifier]) -> None:
        super().__init__()
        self._memory, self._owner = memory, owner

    def forward(self, x: Tensor) -> Tensor:
        self._memory.come_to("layer", self._owner[0], len(x))
        return x.tanh()


class Descent(torch.optim.SGD):
    """An optimizer that needs memory."""

    def __init__(self, model: Tuned) -> None:
        super().__init__(model.parameters(), model.lr, momentum=0.9)
        self._model = [model]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # Lightning gives one
        closure()
        self._model[0].memory.come_to("optimizer", self._model[0])
        super().step()


class Tuned(Classifier):
    """Has a learning rate and a batch size to find."""

    def __init__(self, memory: Small) -> None:
        layers = six_layers()
        for k in (1, 3):  # in each stage
            layers[k] = Remembering(memory, [self])
        super().__init__(layers=layers)
        self.memory, self.lr, self.batch_size = memory, 0.1, 4

    def train_dataloader(self) -> Any:
        return DataLoader(rows(40, seed=1), batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        return DataLoader(rows(12, seed=2), batch_size=self.batch_size)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.memory.come_to("before", self, len(batch[0]))
        loss = super().training_step(batch, batch_idx)
        self.memory.come_to("after", self)
        return loss

    def configure_optimizers(self) -> Any:
        return Descent(self)


CALLBACKS: dict[str, Any] = {
    "lr": partial(LearningRateFinder, num_training_steps=20, update_attr=True),
    "power": partial(BatchSizeFinder, "power", 2, 2, 6),
    "binsearch": partial(BatchSizeFinder, "binsearch", 2, 2, 6),
}


def tuned(
    root: Path,
    processes: str,
    name: str,
    place: str = "",
    rank: int | None = None,
    run: str = "fit",
) -> Any:
    """What is found, and the end of a run with it."""
    torch.manual_seed(0)
    model, finder = Tuned(Small(place, rank)), CALLBACKS[name]()
    options: dict[str, Any] = {"callbacks": [finder], "max_epochs": 2}
    if processes == "plain":
        made = trainer(root, **options)
    else:
        made = trainer_over(root, processes, [2, 4], {"chunks": 1}, **options)
    getattr(made, run)(model)
    logged = {name: float(x) for name, x in made.callback_metrics.items()}
    assert not list(root.glob(".*ckpt")), "what was tried is removed"
    return [model.lr, model.batch_size, made.global_step, *map(logged.get, sorted(logged))]


def found_by_a_plain_trainer(root: Path, *args: Any) -> Any:
    root.mkdir()
    with torch.random.fork_rng(devices=[]):
        return pytest.approx(tuned(root, "plain", *args), rel=1e-9)


@pytest.mark.parametrize(
    "arguments",
    [("lr",), ("power",), ("binsearch",), ("power", "", None, "validate")],
    ids=lambda arguments: "-".join(map(str, arguments)),
)
def test_found_as_by_a_plain_trainer(
    tmp_path: Path, two_ranks: Pool, arguments: tuple[Any, ...]
) -> None:
    expected = found_by_a_plain_trainer(tmp_path / "plain", *arguments)

    found = two_ranks.run(tuned, tmp_path, "per_stage", *arguments)

    assert found == [expected] * 2


@pytest.mark.parametrize(
    "name, place, rank",
    [
        ("power", "layer", 0),
        ("power", "before", 1),
        ("power", "after", 0),
        ("power", "optimizer", 1),
        ("binsearch", "after", 1),
    ],
)
def test_memory_of_one_process(
    tmp_path: Path, two_ranks: Pool, name: str, place: str, rank: int
) -> None:
    """The others take the size for which it has room."""
    expected = found_by_a_plain_trainer(tmp_path / "plain", name, place)

    found = two_ranks.run(tuned, tmp_path, "per_stage", name, place, rank)

    assert found == [expected] * 2
