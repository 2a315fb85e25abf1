"""Replicas that divide states of optimizers, and gradients, train as a plain Trainer.

Here are also the tests of ``sharding``, ``shares``, ``buckets`` and ``optimizer_shards``.
"""

from __future__ import annotations

from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import lightning as L
import lightning.pytorch.callbacks as library
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_gpipe import GPipeStrategy
from tests.lightning.test_optimizers import Thawed, Thaws
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
        options = getattr(self.trainer.strategy, "options", None)
        if options is None or options.sharding == "optimizer":
            assert all(x.grad is not None for x in self.parameters()), "a step leaves gradients"


class Reading(Logging):
    """Reads the state of each parameter, which is an empty one where there was none."""

    def on_train_batch_end(self, *_: Any) -> None:
        [optimizer] = self.trainer.optimizers
        states = [optimizer.state[parameter] for parameter in self.parameters()]
        assert any(states)


class Finetuned(Thawed):
    """Its layers are frozen until a callback adds them to the optimizer."""

    def configure_callbacks(self) -> Any:
        return [Thaws()]


class Averaged(Logging):
    def configure_callbacks(self) -> Any:
        return [library.WeightAveraging()]


BUILDS_HERE: dict[str, Any] = {
    **BUILDS,
    "adagrad": Adagrad,
    "growing": Growing,
    "by itself": ByItself,
    "averaged": partial(Averaged, "adam"),
    "finetuned": Finetuned,
    "reading": partial(Reading, "adam"),
}


# The numbers of elements of parameters that each process of a pipeline has, unless the outputs are
# for the last stage.
HEAD = [8 * 3, 3]


def elements(made: Any) -> list[int]:
    """The number of elements of each parameter that has a state in this process."""
    [first, *_] = made.optimizers
    return sorted(parameter.numel() for parameter in first.state)


class Gradients(Callback):
    """Records the numbers of elements of the gradients in each process, before each step."""

    def __init__(self) -> None:
        self.elements: list[list[int]] = []

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any
    ) -> None:
        found = (x for x in pl_module.parameters() if x.grad is not None)
        self.elements.append(sorted(x.numel() for x in found))


def fit(
    root: Path, place: str, name: str, strategy: dict[str, Any], resume: Path | None, **options: Any
) -> dict[str, Any]:
    """A fit of two replicas with divided states."""
    record = Gradients()
    build = BUILDS_HERE[name]
    model, made = fitted(root, place, build, strategy, resume, callbacks=[record], **options)
    found = {"elements": elements(made), "gradients": record.elements}
    found["divided"] = strategy["sharding"] == "parameters"
    return {**result(model, made), **found}


def plain(root: Path, name: str, **options: Any) -> dict[str, Any]:
    record = Gradients()
    model, made = fitted_plainly(root, BUILDS_HERE[name], callbacks=[record], **options)
    found = {"elements": elements(made), "gradients": record.elements}
    return {**result(model, made), **found}


def assert_same_fit(
    found: list[dict[str, Any]], expected: dict[str, Any], replicas: int, heads: int | None = None
) -> None:
    """Compare with a plain fit; the states of each parameter are in as many processes as it is.

    ``heads`` is the number of processes of a pipeline that have the head; None for all.
    """
    parameters, whole = expected["parameters"], expected["elements"]
    together: list[int] = []
    for each in found:
        own = each["parameters"]
        assert_close(own, {name: parameters[name] for name in own})
        assert each["step"] == expected["step"]
        together += each["elements"]
        # A share is at most a half and the largest parameter.
        here, largest = (f(parameter.numel() for parameter in own.values()) for f in (sum, max))
        if not each["divided"]:  # else it has its share
            assert sum(each["elements"]) <= (here + largest) / replicas
    processes = heads or len(found) // replicas
    head = HEAD * (processes - 1) if whole else []
    assert sorted(together) == sorted(whole + head)


def assert_divided_gradients(
    found: list[dict[str, Any]], expected: dict[str, Any], replicas: int, heads: int | None = None
) -> None:
    """Each gradient of a step is in one replica, in all of its processes with the parameter."""
    others = (heads or len(found) // replicas) - 1
    whole = [
        sorted(step + [size for size in step if size in HEAD] * others)
        for step in expected["gradients"]
    ]
    steps = zip(*(each["gradients"] for each in found), strict=True)
    assert [sorted(chain.from_iterable(step)) for step in steps] == whole


@pytest.fixture(params=["optimizer", "gradients", "parameters"])
def sharding(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.parametrize(
    "place, name, strategy, options",
    [
        ("2x1", "adam", {}, {"gradient_clip_val": 0.05}),
        ("2x2", "adam", {"schedule": "1f1b"}, {"accumulate_grad_batches": 2}),
        ("2x2 nodes", "momentum", {"schedule": "zero_bubble"}, {"gradient_clip_val": 0.05}),
        ("2x2", "adam", {"outputs": "last"}, {}),
        ("2x2", "momentum", {"outputs": "last"}, {"accumulate_grad_batches": 2}),
        ("2x1", "thawing", {"ddp": {"gradient_as_bucket_view": True}}, {}),
        ("2x1", "adagrad", {}, {}),
        ("2x2", "adagrad", {}, {}),
        ("2x1", "by itself", {}, {}),
        ("2x2", "manual", {}, {}),
        pytest.param(
            *("2x1", "averaged", {}, {}),
            marks=pytest.mark.skipif(
                not hasattr(library, "WeightAveraging"), reason="new in Lightning 2.6"
            ),
        ),
        ("2x1", "finetuned", {}, {}),
        ("2x2", "finetuned", {"outputs": "last"}, {}),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_fit(
    tmp_path: Path,
    two_ranks: Pool,
    four_ranks: Pool,
    place: str,
    sharding: str,
    name: str,
    strategy: dict[str, Any],
    options: dict[str, Any],
) -> None:
    expected = plain(tmp_path / "plain", name, **options)
    pool, strategy = two_ranks if place == "2x1" else four_ranks, {"sharding": sharding, **strategy}

    found = pool.run(partial(fit, **options), tmp_path / "both", place, name, strategy, None)

    heads = 1 if strategy.get("outputs") == "last" else None
    assert_same_fit(found, expected, 2, heads)
    if sharding != "optimizer":
        assert_divided_gradients(found, expected, 2, heads)
    one, other = (checkpoint(tmp_path / run / "end.ckpt") for run in ("both", "plain"))
    assert_close(one["state_dict"], other["state_dict"])
    assert_close(one["optimizer_states"], other["optimizer_states"])


def test_weights_are_those_of_whole_states(tmp_path: Path, two_ranks: Pool, sharding: str) -> None:
    whole, divided = (
        two_ranks.run(fit, tmp_path / str(each), "2x1", "adam", {"sharding": each}, None)
        for each in (None, sharding)
    )

    for one, other in zip(whole, divided, strict=True):
        here = {name: one["parameters"][name] for name in other["parameters"]}
        assert_same(here, other["parameters"])
        assert one["logged"] == other["logged"]


def test_parameters_that_come_later(tmp_path: Path, two_ranks: Pool, sharding: str) -> None:
    expected = plain(tmp_path / "plain", "growing")

    strategy = {"sharding": sharding}
    found = two_ranks.run(fit, tmp_path / "both", "2x1", "growing", strategy, None)

    assert_same_fit(found, expected, 2)


def evaluate(root: Path, strategy: dict[str, Any]) -> None:
    """A fit, an evaluation of its checkpoint, and a checkpoint after it."""
    model, made = fitted(root, "2x2", BUILDS_HERE["adam"], strategy)
    made.validate(model, datamodule=Halves(2), ckpt_path=root / "end.ckpt")
    made.save_checkpoint(root / "evaluated.ckpt")


def test_states_outlive_an_evaluation(tmp_path: Path, four_ranks: Pool, sharding: str) -> None:
    """States were dropped of which another replica would have been the owner then."""
    four_ranks.run(evaluate, tmp_path, {"sharding": sharding})

    one, other = (checkpoint(tmp_path / f"{name}.ckpt") for name in ("evaluated", "end"))
    assert_same(one["optimizer_states"], other["optimizer_states"])


@pytest.mark.parametrize("place", ["2x1", "2x2"])
@pytest.mark.parametrize("in_parts", [False, True])
def test_resuming(
    tmp_path: Path, two_ranks: Pool, four_ranks: Pool, place: str, in_parts: bool, sharding: str
) -> None:
    pool = two_ranks if place == "2x1" else four_ranks
    strategy = {"save_distributed_checkpoint": in_parts, "sharding": sharding}
    expected = plain(tmp_path / "plain", "adam", max_epochs=3)
    # Two epochs without shards, one with them, and one in another place.
    plain(tmp_path / "first", "adam", max_epochs=1)

    first, second = tmp_path / "first" / "end.ckpt", tmp_path / "second"
    pool.run(partial(fit, max_epochs=2), second, place, "adam", strategy, first)
    other = "2x1" if place == "2x2" else "2x2"
    pool = four_ranks if place == "2x1" else two_ranks
    third = second / "end.ckpt"
    strategy = {"sharding": sharding}
    found = pool.run(partial(fit, max_epochs=3), tmp_path / "third", other, "adam", strategy, third)

    assert_same_fit(found, expected, 2)


@pytest.mark.parametrize("in_parts", [False, True])
def test_states_that_a_hook_reads(
    tmp_path: Path, two_ranks: Pool, in_parts: bool, sharding: str
) -> None:
    """An empty state in one replica took the place of the owner's in checkpoints."""
    expected = plain(tmp_path / "plain", "reading")
    strategy = {"save_distributed_checkpoint": in_parts, "sharding": sharding}
    first = tmp_path / "first"
    two_ranks.run(partial(fit, max_epochs=1), first, "2x1", "reading", strategy, None)

    strategy, end = {"sharding": None}, first / "end.ckpt"
    found = two_ranks.run(fit, tmp_path / "second", "2x1", "reading", strategy, end)

    for each in found:
        assert_close(each["parameters"], expected["parameters"])
    one, other = (checkpoint(tmp_path / run / "end.ckpt") for run in ("second", "plain"))
    assert_close(one["optimizer_states"], other["optimizer_states"])


# What is refused.


@pytest.mark.parametrize(
    "strategy, message",
    [
        (
            {"sharding": "optimizer"},
            "sharding='optimizer' divides what replicas have: got replicas",
        ),
        ({"sharding": "weights", "replicas": 2}, "must be None or one of 'optimizer', 'gradients'"),
        (
            {"sharding": "gradients", "replicas": 2, "ddp": {"find_unused_parameters": True}},
            "without DistributedDataParallel, .* got ddp with find_unused_parameters. Leave it out",
        ),
    ],
)
def test_impossible_arguments(strategy: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPipeStrategy([2, 4], **strategy)


class OneVector(Logging):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


def refused(root: Path, sharding: str) -> str:
    strategy = {"replicas": 2, "sharding": sharding}
    made = trainer_over(root, "single", [2, 4], strategy, (4, 1))
    return said(lambda: made.fit(OneVector(), datamodule=Halves(2)))


class Sharpness(torch.optim.SGD):
    """Steps by the gradients at other parameters, as sharpness-aware minimization does."""

    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


class Aware(Logging):
    def configure_optimizers(self) -> Any:
        return Sharpness(self.parameters(), 0.1)


def fit_aware(root: Path, sharding: str) -> str:
    strategy = {"replicas": 2, "sharding": sharding}
    made = trainer_over(root, "single", [2, 4], strategy, (4, 1))
    return said(lambda: made.fit(Aware(), datamodule=Halves(2)))


def test_second_call_of_a_closure_is_refused(
    tmp_path: Path, two_ranks: Pool, sharding: str
) -> None:
    """It computed with old values of the parameters that other replicas had changed."""
    for error in two_ranks.run(fit_aware, tmp_path, sharding):
        assert "must call its closure once in a step: got a second call by Sharpness" in error


def test_optimizer_that_steps_all_parameters_together(
    tmp_path: Path, two_ranks: Pool, sharding: str
) -> None:
    for error in two_ranks.run(refused, tmp_path, sharding):
        assert "LBFGS updates a parameter by" in error and "replicas that share its states" in error
