"""``sync_batchnorm=True``: micro-batch i of all replicas is normalised as one of one device is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from tests.lightning.test_processes import checkpoint
from tests.lightning.test_rebalanced_replicas import Moving
from tests.lightning.test_replicas import PLACES, Halves, Logging, assert_close
from tests.support.faults import OwnError
from tests.support.lightning_modules import CLASSES, FEATURES, WIDTH, trainer
from tests.support.processes import said
from tests.support.ranks import Pool, new_ranks
from tests.support.trainers import trainer_over

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

BOTH = 4  # rows of micro-batch i of both replicas: two of each


class Burning(nn.Module):
    """A layer that may raise."""

    burns = False

    def forward(self, x: Tensor) -> Tensor:
        if self.burns:
            raise OwnError("burnt")
        return x.tanh()


def normed_layers() -> nn.Sequential:
    return nn.Sequential(
        nn.BatchNorm1d(FEATURES),
        nn.Linear(FEATURES, WIDTH),
        Burning(),
        nn.BatchNorm1d(WIDTH, affine=False),
        nn.Linear(WIDTH, WIDTH),
        nn.BatchNorm1d(WIDTH, track_running_stats=False),
    )


class Normed(Logging):
    """Has batch norms in both stages and after them."""

    def __init__(self, size: int | None = None) -> None:
        super().__init__(layers=normed_layers())
        self.head = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, CLASSES))  # type: ignore[assignment]
        self._size = size  # of micro-batches, in the plain Trainer
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        pieces = x.split(self._size) if self._size and self.training else [x]
        return self.head(torch.cat([self.layers(each) for each in pieces]))


class Stepping(Normed):
    """Its head sees micro-batches, too, as with a loss for each."""

    def forward(self, x: Tensor) -> Tensor:
        pieces = x.split(self._size) if self._size and self.training else [x]
        return torch.cat([self.head(self.layers(each)) for each in pieces])


class Looping(Normed):
    """Loops over a list of layers."""

    def __init__(self, size: int | None = None) -> None:
        super().__init__(size)
        self.layers = nn.ModuleList(self.layers)  # type: ignore[assignment]  # in its place

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


MODELS = {"sequential": Normed, "stepping": Stepping, "loop": Looping}


def fit(
    root: Path, place: str, name: str, strategy: dict[str, Any], *callbacks: Callback
) -> dict[str, Tensor]:
    processes, balance, machines = PLACES[place]
    torch.manual_seed(0)
    model = MODELS[name]()
    arguments = {"replicas": 2, **strategy}
    options: dict[str, Any] = {"max_epochs": 2, "sync_batchnorm": True, "callbacks": [*callbacks]}
    made = trainer_over(root, processes, balance, arguments, machines, **options)
    made.fit(model, datamodule=Halves(2))
    made.save_checkpoint(root / "end.ckpt")
    return {name: x.detach() for name, x in model.state_dict().items() if not x.is_meta}


def plain(root: Path, name: str, size: int | None) -> dict[str, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MODELS[name](size)
    trainer(root, max_epochs=2).fit(model, datamodule=Halves(1))
    return model.state_dict()


@pytest.mark.parametrize(
    "place, name, strategy",
    [
        ("2x1", "sequential", {"chunks": 1}),
        ("2x1", "sequential", {"chunks": 1, "threads": True, "schedule": "1f1b"}),
        ("2x2", "sequential", {"chunks": 1}),
        ("2x2 nodes", "sequential", {"chunks": 1}),
        ("2x1", "loop", {"chunks": 1}),
        ("2x2", "loop", {"chunks": 1}),
    ],
    ids=str,
)
def test_fit_on_whole_batches_is_that_of_a_plain_trainer(
    tmp_path: Path, two_ranks: Pool, four_ranks: Pool, place: str, name: str, strategy: Any
) -> None:
    expected = plain(tmp_path / "plain", name, None)
    pool = two_ranks if place == "2x1" else four_ranks

    found = pool.run(fit, tmp_path / "both", place, name, strategy)

    for own in found:
        assert_close(own, {name: expected[name] for name in own})
    assert_close(checkpoint(tmp_path / "both" / "end.ckpt")["state_dict"], dict(expected))


@pytest.mark.parametrize(
    "place, name, strategy",
    [
        ("2x1", "sequential", {"threads": True, "activation_checkpointing": "always"}),
        ("2x1", "sequential", {"threads": True, "split_backward": True}),
        ("2x1", "sequential", {"threads": False}),
        ("2x2", "sequential", {}),
        ("2x2", "sequential", {"split_backward": True}),
        ("2x1", "stepping", {"schedule": "1f1b"}),
        ("2x2", "stepping", {"schedule": "zero_bubble"}),
    ],
    ids=str,
)
def test_fit_in_micro_batches(
    tmp_path: Path, two_ranks: Pool, four_ranks: Pool, place: str, name: str, strategy: Any
) -> None:
    expected = plain(tmp_path / "plain", name, BOTH)
    whole = plain(tmp_path / "whole", name, None)
    pool = two_ranks if place == "2x1" else four_ranks

    found = pool.run(fit, tmp_path / "both", place, name, {"chunks": 2, **strategy})

    # In the plain Trainer, norms in the layers update their statistics for each micro-batch. The
    # first one sees the same rows in any case.
    statistics = {name for name in expected if "running" in name or "num_batches" in name}
    deferred = {name for name in statistics if name.startswith("layers.")}
    for own in found:
        assert_close(*({k: x[k] for k in own if k not in deferred} for x in (own, expected)))
        first = [name for name in own if name in deferred and name.startswith("layers.0.")]
        assert_close(*({k: x[k] for k in first} for x in (own, whole)))
    assert len({float(own["head.0.running_mean"].sum()) for own in found}) == 1


def move(root: Path) -> dict[str, Tensor]:
    """A fit in which a batch norm moves to the other stage of its replica."""
    return fit(root, "2x1", "sequential", {"chunks": 1}, Moving(lambda _: [4, 2]))


def test_norm_that_moves(tmp_path: Path, two_ranks: Pool) -> None:
    expected = plain(tmp_path / "plain", "sequential", None)

    for own in two_ranks.run(move, tmp_path / "both"):
        assert_close(own, dict(expected))


def burn(root: Path, place: str, strategy: dict[str, Any]) -> str:
    """What a fit says, if a layer raises in the second replica."""
    processes, balance, machines = PLACES[place]
    model = Normed()
    made = trainer_over(
        root, processes, balance, {"replicas": 2, **strategy}, machines, sync_batchnorm=True
    )
    layer: Any = model.layers[2]
    layer.burns = made.strategy.data_parallel_rank == 1  # type: ignore[attr-defined]
    return said(lambda: made.fit(model, datamodule=Halves(2)))


@pytest.mark.parametrize("threads", [True, False])
def test_replica_that_fails_before_a_norm(tmp_path: Path, threads: bool) -> None:
    with new_ranks(2) as ranks:
        first, second = ranks.run(burn, tmp_path, "2x1", {"threads": threads})

    assert second == "OwnError | burnt"
    assert first.startswith("RankFailed | rank 1 failed: OwnError: burnt")
