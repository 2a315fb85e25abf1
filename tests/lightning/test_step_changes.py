"""All that a step leaves by micro-batch is warned of; its verification leaves nothing.

These are tests of ``step_changes``, ``optimizer_options`` and ``state/changes``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.core.faithful import Changes
from tests.support.lightning_modules import Classifier, Data, assert_same_weights, trainer


def piped(**options: Any) -> dict[str, Any]:
    return {"strategy": GPipeStrategy([3, 3], 4, schedule="1f1b", **options), "devices": 2}


class Meter:
    """An average over rows, as many scripts have."""

    def __init__(self) -> None:
        self.total, self.rows = 0.0, 0

    def update(self, value: Tensor, rows: int) -> None:
        self.total += float(value) * rows
        self.rows += rows


class Warming(nn.Module):
    """A loss that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.weights: Tensor | None = None
        self.cache: Tensor | None = None

    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(output, y)


class Leaving(Classifier):
    """Its step changes something by a function that it is given."""

    change: Callable[[Any, Tensor, int], None]

    def __init__(self) -> None:
        super().__init__()
        self.criterion = Warming()
        self.teacher = nn.Linear(3, 3).double().requires_grad_(False)
        self.history = np.zeros(1000)
        self.meters = {"loss": Meter()}
        self.accuracy = MulticlassAccuracy(3)
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        output = self(x)
        loss: Tensor = self.criterion(output, y)
        type(self).change(self, loss.detach(), len(y))
        self.accuracy(output, y)
        return loss


def count(module: Any, loss: Tensor, rows: int) -> None:
    module.criterion.calls += 1


def edit_data(module: Any, loss: Tensor, rows: int) -> None:
    module.teacher.weight.data.mul_(0.9)


def replace_data(module: Any, loss: Tensor, rows: int) -> None:
    module.teacher.bias.data = module.teacher.bias.data * 0.9


def write_history(module: Any, loss: Tensor, rows: int) -> None:
    module.history[500] += 1


def update_meter(module: Any, loss: Tensor, rows: int) -> None:
    module.meters["loss"].update(loss, rows)


def decay(module: Any, loss: Tensor, rows: int) -> None:
    for group in module.optimizers().param_groups:
        group["lr"] *= 0.9


def compute(module: Any, loss: Tensor, rows: int) -> None:
    module.accuracy.compute()


def fill_cache(module: Any, loss: Tensor, rows: int) -> None:
    if module.criterion.cache is None:
        module.criterion.cache = torch.ones(3)


def make_anew(module: Any, loss: Tensor, rows: int) -> None:
    module.criterion.weights = loss


def nothing(module: Any, loss: Tensor, rows: int) -> None:
    module.criterion.calls = 0


def warned(
    change: Callable[..., None], root: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> str:
    """Return the warnings of a fit about changes that steps have left."""
    monkeypatch.setattr(Leaving, "change", staticmethod(change), raising=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(root, max_epochs=1, **options).fit(Leaving(), Data())
    messages = [str(each.message) for each in caught if "leave nothing" in str(each.message)]
    return "".join(messages)


@pytest.mark.parametrize(
    "change, name",
    [
        (count, "self.criterion.calls."),
        (edit_data, "self.teacher.weight."),
        (replace_data, "self.teacher.bias."),
        (write_history, "self.history."),
        (update_meter, "self.meters[0].rows, self.meters[0].total."),
        (decay, "'lr' of an optimizer."),
        (compute, "the value of self.accuracy.compute()."),
        (make_anew, "self.criterion.weights."),
    ],
)
def test_changes_by_each_micro_batch(
    change: Callable[..., None], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only attributes of the LightningModule itself, and edits that count, were looked at."""
    message = warned(change, tmp_path, monkeypatch, **piped())

    assert message.count("each has changed") == 1 and f"each has changed {name}" in message


@pytest.mark.parametrize("change", [nothing, fill_cache])
def test_what_one_step_does_as_well(
    change: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not warned(change, tmp_path, monkeypatch, **piped())


@pytest.mark.parametrize("verify", [True, "sample"])
@pytest.mark.parametrize("change", [edit_data, replace_data, update_meter, decay])
@pytest.mark.filterwarnings("ignore:training_step must leave nothing")
def test_verification_leaves_nothing(
    change: Callable[..., None], verify: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its runs had moved teachers, counted rows and decayed learning rates."""
    monkeypatch.setattr(Leaving, "change", staticmethod(change), raising=False)

    def run(verify: Any) -> Any:
        made = trainer(tmp_path, max_epochs=1, **piped(verify=verify))
        torch.manual_seed(0)
        made.fit(Leaving(), Data())
        return made

    verified, plain = run(verify), run(False)

    assert_same_weights(verified, plain)
    meters = [each.lightning_module.meters["loss"].rows for each in (verified, plain)]
    rates = [each.optimizers[0].param_groups[0]["lr"] for each in (verified, plain)]
    assert meters[0] == meters[1] and rates[0] == rates[1]


class Freezing(Classifier):
    """Freezes a layer within the step, until it has warmed up."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.layers[0].requires_grad_(self.global_step >= 2)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("verify", [True, "sample", False])
def test_step_that_freezes_a_layer(verify: Any, tmp_path: Path) -> None:
    """Its verification asked for gradients of what it had frozen."""
    made = trainer(tmp_path, max_epochs=1), trainer(tmp_path, max_epochs=1, **piped(verify=verify))
    for each in made:
        torch.manual_seed(0)
        each.fit(Freezing(), Data())

    assert_same_weights(*made)


def test_batches_of_one_micro_batch_are_looked_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once all parameters were looked at in every step, until two batches had several."""
    looks = []

    def changes(*args: Any, **options: Any) -> Changes:
        looks.append(args)
        return Changes(*args, **options)

    monkeypatch.setattr("lightning_gpipe.strategy.step_changes.Changes", changes)
    strategy = GPipeStrategy([3, 3], 1, schedule="1f1b")
    trainer(tmp_path, strategy=strategy, devices=2).fit(Classifier(), Data())

    assert len(looks) == 1
