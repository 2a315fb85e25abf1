"""Processes with neither the first stage nor the last run nothing of the user's steps.

With outputs for the last stage, fits end as in one process all the same; ``inner_processes``.
"""

from __future__ import annotations

from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_gpipe import collect_loss_terms, loss_term, whole
from tests.lightning.test_last_outputs import Everything, Tied, check_fit
from tests.support.lightning_modules import Classifier, Data
from tests.support.processes import said
from tests.support.ranks import Pool, Ranks
from tests.support.trainers import trainer_over

pytestmark = [
    pytest.mark.usefixtures("one_intra_op_thread"),
    # Ours, of batch norms around the pipeline, which see micro-batches.
    pytest.mark.filterwarnings("ignore:training_step must leave nothing on the module"),
]

FOUR = {"per_stage": (4, 1), "per_node": (4, 4)}  # numbers of devices and machines


class Alternating(Classifier):
    """Trains its head alone in every second step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        alone = batch_idx % 2
        loss = self.head.weight.square().sum() if alone else F.cross_entropy(self(x), y)
        self.log("loss", loss)
        return {"loss": loss}


class Metered(Classifier):
    """Calls a metric before its call of the pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.log("inputs", self.mean(x.mean()))
        loss = F.cross_entropy(self(x), y)
        self.log("mean", self.mean)
        return loss


class Penalised(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        loss_term("size", x.square().mean(), reduction="mean")
        return super().forward(x)


class Structured(Classifier):
    """Gives the first layer a structure, of which a part is for all rows, and has loss terms."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1, 6, dtype=torch.float64))
        self.layers[0] = Shifting(6, 8).double()
        self.layers[4] = Penalised(8, 8).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        with collect_loss_terms() as terms:
            output = self.head(self.layers({"x": x, "shift": whole(self.shift), "name": "rows"}))
        loss: Tensor = F.cross_entropy(output, y) + 0.1 * terms["size"]
        self.log("loss", loss)
        return loss

    def _evaluate(self, batch: Any, stage: str) -> None:
        output = self.head(self.layers({"x": batch[0], "shift": whole(self.shift), "name": "rows"}))
        self.log(f"{stage}_loss", F.cross_entropy(output, batch[1]))


class Shifting(nn.Linear):
    def forward(self, value: Any) -> Tensor:
        return super().forward(value["x"] + value["shift"])


@pytest.mark.parametrize(
    "mode, schedule, kind, options",
    [
        ("per_stage", "fill_drain", Everything, {"accumulate_grad_batches": 2}),
        ("per_stage", "1f1b", Everything, {"gradient_clip_val": 0.05}),
        ("per_stage", "zero_bubble", Tied, {}),
        ("per_node", "1f1b", Everything, {"accumulate_grad_batches": 2}),
        ("per_stage", "fill_drain", Classifier, {"precision": "bf16-mixed"}),
        ("per_stage", "fill_drain", Alternating, {}),
        ("per_stage", "fill_drain", Metered, {}),
        ("per_stage", "fill_drain", Structured, {}),
        ("per_stage", "1f1b", Structured, {}),
    ],
)
def test_fit(
    tmp_path: Path,
    four_ranks: Pool,
    mode: str,
    schedule: Any,
    kind: type[Classifier],
    options: dict[str, Any],
) -> None:
    check_fit(tmp_path, four_ranks, mode, schedule, kind, options, FOUR[mode])


def test_alternating_steps_over_two_processes(tmp_path: Path, two_ranks: Pool) -> None:
    """Once the gradients of a step without the pipeline were those of all processes, added up."""
    check_fit(tmp_path, two_ranks, "per_stage", "fill_drain", Alternating, {}, (2, 1))


# What runs where.


class Counting(Classifier):
    """Counts its steps by their kinds, and the calls of its head."""

    def __init__(self) -> None:
        super().__init__()
        # Of this process: others are not told of such an object.
        self.began = SimpleNamespace(train=0, val=0, test=0, head=0)
        self.head.register_forward_hook(lambda *_: self._count("head"))

    def _count(self, kind: str) -> None:
        vars(self.began)[kind] += 1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self._count("train")
        return super().training_step(batch, batch_idx)

    def _evaluate(self, batch: Any, stage: str) -> None:
        self._count(stage)
        super()._evaluate(batch, stage)


def counts(root: Path, schedule: str, verify: bool) -> dict[str, int]:
    strategy = {"outputs": "last", "schedule": schedule, "chunks": 2, "verify": verify}
    made = trainer_over(root, "per_stage", [2, 2, 2], strategy, (3, 1), max_epochs=1)
    model = Counting()
    made.fit(model, datamodule=Data())
    made.test(model, datamodule=Data(), verbose=False)
    return vars(model.began)


@pytest.mark.parametrize("schedule", ["fill_drain", "1f1b"])
def test_only_the_processes_of_both_ends_run_steps(
    tmp_path: Path, three_ranks: Ranks, schedule: str
) -> None:
    last, inner, first = three_ranks.run(counts, tmp_path, schedule, False)

    steps = 3 * (1 if schedule == "fill_drain" else 2)  # of a batch, or of micro-batches
    assert last == {"train": steps, "val": 4, "test": 2, "head": steps + 6}
    assert first == {**last, "head": 0}
    assert inner == dict.fromkeys(last, 0)


def test_all_processes_run_steps_that_are_verified(tmp_path: Path, three_ranks: Ranks) -> None:
    _, inner, first = three_ranks.run(counts, tmp_path, "fill_drain", True)

    assert inner == first
    assert inner["train"] == 3


# Batches.


class Seen(Callback):
    """Notes which batches have values in this process, and their shapes."""

    def __init__(self) -> None:
        self.batches: list[tuple[bool, torch.Size]] = []

    def _note(self, batch: Any) -> None:
        self.batches.append((batch[0].is_meta or batch[1].is_meta, batch[0].shape))

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, *_: Any) -> None:
        self._note(batch)

    def on_validation_batch_start(self, trainer: Any, module: Any, batch: Any, *_: Any) -> None:
        self._note(batch)

    def on_predict_batch_start(self, trainer: Any, module: Any, batch: Any, *_: Any) -> None:
        self._note(batch)


class Transferring(Classifier):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + torch.rand(()), batch[1]]


def batches(root: Path, kind: type[Classifier], schedule: str, verify: Any) -> Any:
    """The batches of a fit, and those of a prediction after it."""
    strategy = {"outputs": "last", "schedule": schedule, "chunks": 2, "verify": verify}
    seen, model = Seen(), kind()
    options: dict[str, Any] = {"max_epochs": 1, "callbacks": [seen]}
    made = trainer_over(root, "per_stage", [2, 2, 2], strategy, (3, 1), **options)
    made.fit(model, datamodule=Data())
    fitted, seen.batches = seen.batches, []
    predicted = made.predict(model, datamodule=Data()) or []
    return fitted, seen.batches, [x.shape for x in predicted if isinstance(x, Tensor)]


SHAPES = [torch.Size([rows, 6]) for rows in (5, 4, 7, 7, 6, 5, 4)]  # sanity check, fit, validation


@pytest.mark.parametrize(
    "schedule, verify, read",
    [("fill_drain", "sample", 0), ("1f1b", False, 0), ("1f1b", "sample", 3)],
)
def test_only_the_processes_of_both_ends_read_batches(
    tmp_path: Path, three_ranks: Ranks, schedule: str, verify: Any, read: int
) -> None:
    """If the first step is verified, all read those that are loaded before it."""
    last, inner, first = three_ranks.run(batches, tmp_path, Classifier, schedule, verify)

    for fitted, predicted, outputs in (last, first):
        assert fitted == [(False, shape) for shape in SHAPES]
        assert predicted == [(False, shape) for shape in SHAPES[:2]]
        assert outputs == [(5, 3), (4, 3)]
    assert inner == ([(k >= read, shape) for k, shape in enumerate(SHAPES)], *first[1:])


def test_all_processes_read_batches_that_hooks_change(tmp_path: Path, three_ranks: Ranks) -> None:
    found = three_ranks.run(batches, tmp_path, Transferring, "fill_drain", False)

    assert all(fitted == [(False, shape) for shape in SHAPES] for fitted, *_ in found)


# What steps leave to layers, for which all processes run them.

VARIABLE: ContextVar[float] = ContextVar("scale", default=1.0)


class Scaled(nn.Linear):
    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale * VARIABLE.get()


class Leaving(Everything):
    def __init__(self) -> None:
        super().__init__()
        self.layers[2] = Scaled(8, 8).double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        vars(self.layers[2])["scale"] = float(batch_idx + 1)
        return super().training_step(batch, batch_idx)


class Setting(Leaving):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        VARIABLE.set(1.0 + batch_idx)
        return Everything.training_step(self, batch, batch_idx)


class Blocked(Leaving):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = self.before(x.double())
        with torch.autocast("cpu", torch.bfloat16):
            output = self.layers(x)
        loss = F.cross_entropy(self.head(output.double()), y)
        self.log("loss", loss)
        return loss


class LeavingLater(Leaving):
    """Leaves something after a first step, in which it is settled where parameters are."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step:
            return super().training_step(batch, batch_idx)
        return Everything.training_step(self, batch, batch_idx)


class Clamping(Everything):
    """Edits the weight of a layer."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            self.get_parameter("layers.2.weight").clamp_(-0.2, 0.2)
        return super().training_step(batch, batch_idx)


class Freezing(Everything):
    """Trains a layer in the first steps only."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.layers[2].requires_grad_(self.global_step < 2)
        return super().training_step(batch, batch_idx)


class Filling(Everything):
    """Edits a buffer of a layer from the second step on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2] = Buffered(8, 8).double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step:
            self.get_buffer("layers.2.factor").fill_(1.0 / self.global_step)
        return super().training_step(batch, batch_idx)


class Buffered(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("factor", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.get_buffer("factor")


class ScalingLater(Leaving):
    """Sets an attribute of a layer after the call, for the next step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outcome = Everything.training_step(self, batch, batch_idx)
        vars(self.layers[2])["scale"] = 1.0 + 0.5 * self.global_step
        return outcome


class Following(Everything):
    """Has a layer before the call that follows another one, by edits after the call."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(6, 6).double().requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outcome = super().training_step([self.teacher(batch[0].double()), batch[1]], batch_idx)
        with torch.no_grad():
            self.teacher.weight.mul_(0.5).add_(outcome["loss"])
        return outcome


class Smoothing(Everything):
    """Keeps a mean of its losses as a tensor, by which it weights the next step's input."""

    def __init__(self) -> None:
        super().__init__()
        self.smooth = torch.ones((), dtype=torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outcome = super().training_step([batch[0] * self.smooth, batch[1]], batch_idx)
        self.smooth = 0.5 * self.smooth + 0.5 * outcome["loss"].detach()
        return outcome


class Averaging(Smoothing):
    """Edits that tensor in place, and keeps a number of NumPy."""

    def __init__(self) -> None:
        super().__init__()
        self.level: Any = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0] * self.smooth.item() * float(self.level)
        outcome = Everything.training_step(self, [x, batch[1]], batch_idx)
        self.smooth.mul_(0.5).add_(0.5 * outcome["loss"].detach())
        self.level = np.mean([self.level, outcome["loss"].item()])
        return outcome


class Constrained(Everything):
    """Edits a weight before its use, which a backward before the pipeline needs as it is then."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            self.get_parameter("stem.1.weight").clamp_(-0.2, 0.2)
        return super().training_step([self.stem(batch[0].double()), batch[1]], batch_idx)


class LeavingOnce(Leaving):
    """Leaves a tensor to a layer in the first step, on the device of its weight."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        layer = self.layers[2]
        if "scale" not in vars(layer):
            vars(layer)["scale"] = self.get_parameter("layers.2.weight").new_full((), 0.5)
        return Everything.training_step(self, batch, batch_idx)


@pytest.mark.parametrize(
    "kind, schedule",
    [
        (Averaging, "fill_drain"),
        (Constrained, "fill_drain"),
        (LeavingOnce, "fill_drain"),
        (Clamping, "fill_drain"),
        (Freezing, "fill_drain"),
        (Freezing, "1f1b"),
        (Filling, "fill_drain"),
        (ScalingLater, "fill_drain"),
        (Smoothing, "fill_drain"),
        (Following, "fill_drain"),
        (Leaving, "fill_drain"),
        (Leaving, "1f1b"),
        (Setting, "fill_drain"),
        (Blocked, "fill_drain"),
        (LeavingLater, "fill_drain"),
        (LeavingLater, "zero_bubble"),
    ],
)
def test_steps_that_leave_something_to_layers(
    tmp_path: Path, four_ranks: Pool, kind: type[Classifier], schedule: str
) -> None:
    check_fit(tmp_path, four_ranks, "per_stage", schedule, kind, {}, FOUR["per_stage"])


class ClampingLater(Everything):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outcome = super().training_step(batch, batch_idx)
        with torch.no_grad():
            self.get_parameter("layers.2.weight").clamp_(-0.2, 0.2)
        return outcome


def refused(root: Path, schedule: str) -> str:
    strategy = {"outputs": "last", "chunks": 2, "verify": False, "schedule": schedule}
    made = trainer_over(root, "per_stage", [2, 2, 2], strategy, (3, 1), max_epochs=1)
    return said(lambda: made.fit(ClampingLater(), datamodule=Data()))


@pytest.mark.parametrize("schedule", ["fill_drain", "1f1b"])
def test_weight_that_is_edited_in_one_process(
    tmp_path: Path, three_ranks: Ranks, schedule: str
) -> None:
    """Once the process that has it kept it as it was."""
    for error in three_ranks.run(refused, tmp_path, schedule):
        assert "a step must not edit parameters or buffers of layers after its call" in error
        assert "weight of layers.2" in error
