"""Losses that are means over targets, of which micro-batches have different numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_gpipe import GPipe
from lightning_gpipe.core.run.micro_batch_losses.target_means import target_weights

CLASSES = 3
WEIGHTS = torch.tensor([1.0, 2.0, 3.0])


def targets(*values: int) -> Tensor:
    return torch.tensor(values)


def run(loss: Callable[[Tensor, Tensor], Any], y: Tensor) -> Any:
    """A step by micro-batch, of two rows each."""
    model = GPipe(
        nn.Sequential(nn.Linear(4, 8), nn.Linear(8, CLASSES)), [1, 1], devices=["cpu"] * 2
    )
    model.chunks = 2
    x = torch.randn(len(y), 4)
    outcome = model.by_micro_batch(lambda batch: loss(model(batch[0]), batch[1]), (x, y))
    model.close()
    return outcome


def mean(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y)


def with_another(z: Tensor, y: Tensor) -> Tensor:
    return F.nll_loss(z.log_softmax(-1), y) + 0.1 * z.square().mean()


def weighted_classes(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, weight=WEIGHTS).reshape(())


def of_times(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z[..., None].expand(-1, -1, 2), y[:, None].expand(-1, 2))


@pytest.mark.parametrize("loss", [mean, with_another, weighted_classes, of_times])
def test_mean_over_fewer_targets_is_refused(loss: Callable[..., Any]) -> None:
    """It was weighted by rows, if the few rows that are verified had all of their targets."""
    run(loss, targets(0, 1, 1, 0))

    with pytest.raises(RuntimeError, match=r"with \d, \d targets that count .* of 2, 2 rows"):
        run(loss, targets(0, 0, -100, 2))


def test_numbers_of_targets_that_are_told() -> None:
    def loss(z: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(z, y), "loss_weight": (y >= 0).sum()}

    run(loss, targets(0, 1, -100, 2))


@pytest.mark.parametrize(
    "loss",
    [
        lambda z, y: F.cross_entropy(z, y, reduction="sum") / 4,
        lambda z, y: F.cross_entropy(z, y, reduction="none").mean(),
        lambda z, y: F.cross_entropy(z, y) * (y >= 0).sum() / 2,
        lambda z, y: F.cross_entropy(z, F.one_hot(y.clamp(0), CLASSES).float()),
    ],
    ids=["sum", "rows", "corrected", "probabilities"],
)
def test_other_losses(loss: Callable[..., Any]) -> None:
    run(loss, targets(0, 1, -100, 2))


def test_loss_without_a_graph() -> None:
    assert not target_weights(torch.tensor(1.0).grad_fn)
