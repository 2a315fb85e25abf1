"""Replicas that divide the states of their optimizers train as a plain Trainer on whole batches.

Here are also the tests of ``sharding`` and ``optimizer_shards``.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor

from lightning_gpipe import GPipeStrategy
from tests.lightning.test_processes import checkpoint
from tests.lightning.test_replicas import (
    BUILDS,
    Halves,
    Logging,
    assert_close,
    fitted,
    fitted_plainly,
    result,
)
from tests.support.models import assert_same
from tests.support.processes import said
from tests.support.ranks import Pool
from tests.support.trainers import trainer_over

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


class Adagrad(Logging):
    """Has states from the beginning."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), 0.05, weight_decay=0.01)


class Growing(Logging):
    """Adds the parameters of its head to the optimizer in the second epoch."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.layers.parameters(), 0.01)

    def on_train_epoch_start(self) -> None:
        optimizer: Any = self.optimizers()
        if self.current_epoch == 1 and len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": self.head.parameters(), "lr": 0.02})


class ByItself(Logging):
    """Optimizes by itself, with a closure and without."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(self(batch[0]), batch[1])
            self.manual_backward(loss)
            return loss

        if batch_idx % 2:
            optimizer.step(closure=closure)
        else:
            closure()
            optimizer.step()
        assert all(x.grad is not None for x in self.parameters()), "a step leaves gradients"


class Averaged(Logging):
    def configure_callbacks(self) -> Any:
        return [WeightAveraging()]


BUILDS_HERE: dict[str, Any] = {
    **BUILDS,
    "adagrad": Adagrad,
    "growing": Growing,
    "by itself": ByItself,
    "averaged": partial(Averaged, "adam"),
}


def elements(made: Any) -> list[int]:
    """The number of elements of each parameter that has a state in this process."""
    [first, *_] = made.optimizers
    return sorted(parameter.numel() for parameter in first.state)


def fit(
    root: Path, place: str, name: str, strategy: dict[str, Any], resume: Path | None, **options: Any
) -> dict[str, Any]:
    """A fit of two replicas with divided states."""
    strategy = {"sharding": "optimizer", **strategy}
    model, made = fitted(root, place, BUILDS_HERE[name], strategy, resume, **options)
    return {**result(model, made), "elements": elements(made)}


def plain(root: Path, name: str, **options: Any) -> dict[str, Any]:
    model, made = fitted_plainly(root, BUILDS_HERE[name], **options)
    return {**result(model, made), "elements": elements(made)}


def assert_same_fit(found: list[dict[str, Any]], expected: dict[str, Any], replicas: int) -> None:
    """Compare with a plain fit; the states of each parameter are in as many processes as it is."""
    parameters, whole = expected["parameters"], expected["elements"]
    together: list[int] = []
    for each in found:
        own = each["parameters"]
        assert_close(own, {name: parameters[name] for name in own})
        assert each["step"] == expected["step"]
        together += each["elements"]
        # A share is at most a half and the largest parameter.
        here = sum(parameter.numel() for parameter in own.values())
        largest = max(parameter.numel() for parameter in own.values())
        assert sum(each["elements"]) <= (here + largest) / replicas
    processes = len(found) // replicas
    head = [8 * 3, 3] * (processes - 1)  # which each process of a pipeline has
    assert sorted(together) == sorted(whole + head)


@pytest.mark.parametrize(
    "place, name, strategy, options",
    [
        ("2x1", "adam", {}, {"gradient_clip_val": 0.05}),
        ("2x2", "adam", {"schedule": "1f1b"}, {"accumulate_grad_batches": 2}),
        ("2x2 nodes", "momentum", {"schedule": "zero_bubble"}, {"gradient_clip_val": 0.05}),
        ("2x2", "adam", {"outputs": "last"}, {}),
        ("2x1", "thawing", {"ddp": {"gradient_as_bucket_view": True}}, {}),
        ("2x1", "adagrad", {}, {}),
        ("2x2", "adagrad", {}, {}),
        ("2x1", "by itself", {}, {}),
        ("2x1", "averaged", {}, {}),
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

    found = pool.run(partial(fit, **options), tmp_path / "both", place, name, strategy, None)

    assert_same_fit(found, expected, 2)
    one, other = (checkpoint(tmp_path / run / "end.ckpt") for run in ("both", "plain"))
    assert_close(one["state_dict"], other["state_dict"])
    assert_close(one["optimizer_states"], other["optimizer_states"])


def test_weights_are_those_of_whole_states(tmp_path: Path, two_ranks: Pool) -> None:
    whole, divided = (
        two_ranks.run(fit, tmp_path / str(sharding), "2x1", "adam", {"sharding": sharding}, None)
        for sharding in (None, "optimizer")
    )

    for one, other in zip(whole, divided, strict=True):
        assert_same(one["parameters"], other["parameters"])
        assert one["logged"] == other["logged"]


def test_parameters_that_come_later(tmp_path: Path, two_ranks: Pool) -> None:
    expected = plain(tmp_path / "plain", "growing")

    found = two_ranks.run(fit, tmp_path / "both", "2x1", "growing", {}, None)

    assert_same_fit(found, expected, 2)


@pytest.mark.parametrize("place", ["2x1", "2x2"])
@pytest.mark.parametrize("in_parts", [False, True])
def test_resuming(
    tmp_path: Path, two_ranks: Pool, four_ranks: Pool, place: str, in_parts: bool
) -> None:
    pool = two_ranks if place == "2x1" else four_ranks
    strategy = {"save_distributed_checkpoint": in_parts}
    expected = plain(tmp_path / "plain", "adam", max_epochs=3)
    # Two epochs without shards, one with them, and one in another place.
    plain(tmp_path / "first", "adam", max_epochs=1)

    first, second = tmp_path / "first" / "end.ckpt", tmp_path / "second"
    pool.run(partial(fit, max_epochs=2), second, place, "adam", strategy, first)
    other = "2x1" if place == "2x2" else "2x2"
    pool = four_ranks if place == "2x1" else two_ranks
    third = second / "end.ckpt"
    found = pool.run(partial(fit, max_epochs=3), tmp_path / "third", other, "adam", {}, third)

    assert_same_fit(found, expected, 2)


# What is refused.


@pytest.mark.parametrize(
    "strategy, message",
    [
        ({"sharding": "optimizer"}, "sharding='optimizer' divides states among replicas: got repl"),
        ({"sharding": "weights", "replicas": 2}, "must be None or 'optimizer': got 'weights'"),
    ],
)
def test_impossible_arguments(strategy: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPipeStrategy([2, 4], **strategy)


class OneVector(Logging):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


def refused(root: Path) -> str:
    strategy = {"replicas": 2, "sharding": "optimizer"}
    made = trainer_over(root, "single", [2, 4], strategy, (4, 1))
    return said(lambda: made.fit(OneVector(), datamodule=Halves(2)))


def test_optimizer_that_steps_all_parameters_together(tmp_path: Path, two_ranks: Pool) -> None:
    for error in two_ranks.run(refused, tmp_path):
        assert "LBFGS joins the gradients" in error and "replicas that share its states" in error
