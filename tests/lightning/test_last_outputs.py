"""Fits in which only the process of the last stage gets the outputs end as in one process.

Sums of gradients are added in another order where a parameter is used before and after the call.
That is what ``last_outputs`` does, and ``step_at_last`` below it.
"""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_gpipe import GPipeStrategy
from tests.lightning.test_processes import checkpoint
from tests.lightning.test_replicas import PLACES, Halves, Logging, result
from tests.lightning.test_schedules import Embedded, Record
from tests.lightning.test_schedules_over_processes import FOLDED
from tests.promises.test_drawn_fits import numbers
from tests.support.lightning_modules import Classifier, Data, six_layers, trainer
from tests.support.models import assert_same
from tests.support.processes import said
from tests.support.ranks import Pool
from tests.support.trainers import MODES, trainer_over

pytestmark = [
    pytest.mark.usefixtures("one_intra_op_thread"),
    # Ours, of batch norms around the pipeline, which see micro-batches.
    pytest.mark.filterwarnings("ignore:training_step must leave nothing on the module"),
]


class Everything(Embedded):
    """Draws, keeps statistics and logs before and after the call of the pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = nn.Sequential(nn.Dropout(0.2), nn.BatchNorm1d(8).double())
        self.enter = nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.1)).double()
        self.leave = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.1)).double()
        self.mean = MeanMetric()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(super().forward(self.enter(x)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("batch", float(batch_idx))
        outcome = super().training_step(batch, batch_idx)
        self.mean.update(outcome["output"].mean())
        self.log("mean", self.mean)
        return outcome

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if isinstance(self.trainer.strategy, GPipeStrategy):
            self.log_dict(self.trainer.strategy.grad_norm(self))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.seen.append(torch.rand(()))

    def on_validation_epoch_end(self) -> None:
        self.log("seen", sum(self.seen, torch.zeros(())) / max(len(self.seen), 1))
        self.log("known", self.mean.compute() if self.mean.update_called else 0.0)


class Tied(Classifier):
    """Uses the weight of a layer after the pipeline, too."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 8, bias=False)
        self.last.weight = self.layers[2].weight  # type: ignore[assignment]  # of a Linear

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.head(self.last(self.layers(x))), y)
        self.log("loss", loss)
        return loss


class Keeping(Classifier):
    """Keeps outputs of steps on itself until the end of the epoch, as Lightning's users do."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        self.predicted = defaultdict[str, list[Any]](list)
        self.logits: list[Tensor] = []
        self.memory = torch.zeros(4, 5_000, dtype=torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.memory = self.memory.roll(1, 0) + batch[0].sum()  # all processes with the step do it
        loss = super().training_step(batch, batch_idx) + 0.01 * self.memory.mean()
        self.losses.append(loss)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("mean_loss", torch.stack(self.losses).mean())
        self.losses.clear()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        output = self(x)
        self.predicted["right"].append((output.argmax(1) == y).numpy())
        self.logits.append(output.repeat(5_000, 1))
        self.log("val_loss", F.cross_entropy(output, y))

    def on_validation_epoch_end(self) -> None:
        right, logits = np.concatenate(self.predicted.pop("right")), torch.cat(self.logits)
        self.logits.clear()
        self.log("right", float(right.mean()))
        self.log("variance", logits.var())
        if logits.is_meta:
            with pytest.raises(RuntimeError, match="meta"):
                logits.mean().item()


class Steering(Classifier):
    """Sets options of its optimizer and ends the fit, by values that the other processes lack."""

    def __init__(self) -> None:
        super().__init__("adam")
        self.place = SimpleNamespace(known=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        [group] = self.trainer.optimizers[0].param_groups
        group["lr"] = 0.01 * (1 + self.global_step)
        self.place.known = True
        if self.global_step == 4:
            self.trainer.should_stop = True
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        [group] = self.trainer.optimizers[0].param_groups
        group["betas"] = (0.5 if self.place.known else 0.9, 0.99)


def fit(
    root: Path,
    processes: str,
    mode: str,
    schedule: Any,
    kind: type[Classifier],
    options: dict[str, Any],
    machines: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """A fit with validation, and what came of it in this process."""
    torch.manual_seed(0)
    model, record = kind(), Record()
    outputs = {} if processes == "single" else {"outputs": "last"}
    machines = machines or MODES[mode]
    stages = machines[0] * (2 if schedule in ("zero_bubble_v", FOLDED) else 1)
    made = trainer_over(
        root,
        processes,
        [6 // stages + (k < 6 % stages) for k in range(stages)],
        {"chunks": 4, "schedule": schedule, "verify": False, **outputs},
        (machines[0], 1) if processes == "single" else machines,
        callbacks=[record, EarlyStopping("val_loss", patience=5)],
        max_epochs=2,
        **options,
    )
    made.fit(model, datamodule=Data(shuffle=True))
    made.save_checkpoint(root / "end.ckpt")
    [tested] = made.test(model, datamodule=Data(), verbose=False)
    layers = dict(model.layers.named_buffers(prefix="layers"))  # whose checkpoint has them
    tensors = {name: x for name, x in model.state_dict().items() if name not in layers}
    return {
        "calls": record.calls,
        "logged": record.logged,
        "loss": [outputs["loss"] for outputs in record.outputs],
        "end": {key: float(value) for key, value in made.callback_metrics.items()},
        "tested": tested,
        "random": torch.rand(()),
        "state": {name: x.detach() for name, x in tensors.items() if not x.is_meta},
        "outputs": record.outputs,
    }


@pytest.mark.parametrize(
    "mode, schedule, kind, options",
    [
        ("per_stage", "fill_drain", Everything, {}),
        ("per_stage", "1f1b", Everything, {"accumulate_grad_batches": 2}),
        ("per_node", "fill_drain", Everything, {"gradient_clip_val": 0.05}),
        ("per_node", "1f1b", Tied, {}),
        ("per_stage", "fill_drain", Tied, {"accumulate_grad_batches": 2}),
        ("per_stage", "zero_bubble", Classifier, {"precision": "bf16-mixed"}),
        ("per_stage", "zero_bubble_v", Everything, {"gradient_clip_val": 0.05}),
        ("per_stage", FOLDED, Everything, {}),
        ("per_stage", "fill_drain", Keeping, {}),
        ("per_node", "1f1b", Keeping, {"accumulate_grad_batches": 2}),
        ("per_stage", "fill_drain", Steering, {}),
        ("per_stage", "1f1b", Steering, {"accumulate_grad_batches": 2}),
    ],
)
def test_fit(
    tmp_path: Path,
    two_ranks: Pool,
    mode: str,
    schedule: Any,
    kind: type[Classifier],
    options: dict[str, Any],
) -> None:
    check_fit(tmp_path, two_ranks, mode, schedule, kind, options, MODES[mode])


def check_fit(
    tmp_path: Path,
    ranks: Pool,
    mode: str,
    schedule: Any,
    kind: type[Classifier],
    options: dict[str, Any],
    machines: tuple[int, int],
) -> None:
    """Compare a fit over processes with one in a single process."""
    args = mode, schedule, kind, options, machines
    with torch.random.fork_rng(devices=[]):
        expected = fit(tmp_path / "single", "single", *args)

    first, *others = ranks.run(fit, tmp_path / "both", mode, *args)

    assert_close(first.pop("outputs"), expected.pop("outputs"))
    state, everywhere = expected.pop("state"), set[str]()
    for each in (first, *others):
        own = each.pop("state")
        assert_close(own, {name: state[name] for name in own})
        each.pop("outputs", None)
        assert_close(each, expected)
        everywhere |= own.keys()
    assert everywhere == state.keys()
    assert_close(*(checkpoint(tmp_path / run / "end.ckpt") for run in ("both", "single")))


def assert_close(one: Any, two: Any) -> None:
    assert_same(numbers(one), numbers(two), within=1e-9)  # a fit magnifies rounding


# Replicas.


def replicas(root: Path, place: str, schedule: Any, options: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Logging("momentum", six_layers())
    processes, balance, machines = PLACES[place]
    strategy = {"chunks": 4, "replicas": 2, "schedule": schedule, "outputs": "last"}
    made = trainer_over(root, processes, balance, strategy, machines, max_epochs=2, **options)
    made.fit(model, datamodule=Halves(2))
    return result(model, made)


@pytest.mark.parametrize(
    "place, schedule, options",
    [("2x2", "fill_drain", {"accumulate_grad_batches": 2}), ("2x2 nodes", "1f1b", {})],
)
def test_replicas(
    tmp_path: Path, four_ranks: Pool, place: str, schedule: str, options: dict[str, Any]
) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain = Logging("momentum", six_layers())
        made = trainer(tmp_path, max_epochs=2, **options)
        made.fit(plain, datamodule=Halves(1))
        expected = result(plain, made)

    for found in four_ranks.run(replicas, tmp_path, place, schedule, options):
        assert found["step"] == expected["step"]
        own = found["parameters"]
        assert_close(own, {name: expected["parameters"][name] for name in own})
        torch.testing.assert_close(found["logged"], expected["logged"])


# Refusals.


class Twice(Classifier):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + super().forward(x)


class Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Attacking(Classifier):
    """Differentiates by its batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x.requires_grad_()
        [gradient] = torch.autograd.grad(F.cross_entropy(self(x), y), x)
        return gradient.square().sum()


class Unknown(Classifier):
    """Logs a metric of which other processes know nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        metric = MeanMetric()
        metric(loss.detach())
        self.log("loss", metric)
        return loss


class Reducing(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, reduce_fx=torch.median)
        return loss


class Fails(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise OSError(f"the loss of {super().training_step(batch, batch_idx).dim()} dims")


REFUSED = {
    Twice: "a step must call the pipeline once",
    Manual: "outputs='last' needs automatic optimization",
    Attacking: "a step must not run backward or torch.autograd.grad through the pipeline",
    Unknown: "a metric that is logged must be a module",
    Reducing: "reduce_fx must be one of 'mean', 'min', 'max', 'sum'",
    Fails: "the loss of 0 dims",
}


def refused(root: Path, kind: type[Classifier], schedule: str = "fill_drain") -> str:
    strategy = {"outputs": "last", "schedule": schedule, "chunks": 2}
    made = trainer_over(root, "per_stage", [3, 3], strategy, max_epochs=1)
    return said(lambda: made.fit(kind(), datamodule=Data()))


@pytest.mark.parametrize("kind", REFUSED)
def test_steps_that_are_refused(tmp_path: Path, two_ranks: Pool, kind: type[Classifier]) -> None:
    first, second = two_ranks.run(refused, tmp_path, kind)

    assert REFUSED[kind] in first and REFUSED[kind] in second
    assert second.startswith("RankFailed") == (kind is not Manual)


class Drawing(Classifier):
    """Draws before its call, and after it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        output = self(x * random.random())
        return F.cross_entropy(output, y) * random.random()


class DrawingBefore(Drawing):
    """Draws before its call only, which all processes do for all micro-batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return Classifier.training_step(self, [batch[0] * random.random(), batch[1]], batch_idx)


@pytest.mark.parametrize("kind, schedule", [(Drawing, "fill_drain"), (DrawingBefore, "1f1b")])
def test_draws_from_python(
    tmp_path: Path, two_ranks: Pool, kind: type[Classifier], schedule: str
) -> None:
    assert two_ranks.run(refused, tmp_path, kind, schedule) == ["none", "none"]


def test_draws_from_python_on_both_sides_of_calls_for_micro_batches(
    tmp_path: Path, two_ranks: Pool
) -> None:
    for error in two_ranks.run(refused, tmp_path, Drawing, "1f1b"):
        assert "got draws from random on both sides" in error


class Ending(Classifier):
    """Has a block around its call, whose end it looks at."""

    def __init__(self) -> None:
        super().__init__()
        # Of this process, since others are not told of such an object.
        self.blocks = SimpleNamespace(open=0, most=0, ends=[])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        blocks = self.blocks
        blocks.open += 1
        blocks.most = max(blocks.most, blocks.open)
        try:
            return super().training_step(batch, batch_idx)
        finally:
            blocks.open -= 1
            blocks.ends.append((torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))


def ends_of_blocks(root: Path) -> tuple[int, int, list[tuple[bool, bool]]]:
    strategy = {"outputs": "last", "schedule": "1f1b", "chunks": 4}
    made = trainer_over(
        root,
        "per_stage",
        [3, 3],
        strategy,
        max_epochs=1,
        limit_train_batches=2,
        precision="bf16-mixed",
    )
    model = Ending()
    made.fit(model, datamodule=Data())
    return model.blocks.open, model.blocks.most, model.blocks.ends


def test_blocks_around_calls_end_in_the_state_of_the_step(tmp_path: Path, two_ranks: Pool) -> None:
    """A process that does not get the output leaves them at each call."""
    (last, most, ends), other = two_ranks.run(ends_of_blocks, tmp_path)

    assert (last, most, ends) == (0, 2, [(True, True)] * 8)
    assert other == (0, 1, [(True, True)] * 8)


class Single(Classifier):
    """Logs a number in single precision."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("single", loss.detach().float(), on_step=True, on_epoch=True)
        return loss


def types_of_logs(root: Path, schedule: str, outputs: str) -> dict[str, torch.dtype]:
    strategy = {"outputs": outputs, "schedule": schedule, "chunks": 2}
    made = trainer_over(root, "per_stage", [3, 3], strategy, max_epochs=1, precision="64-true")
    made.fit(Single(), datamodule=Data())
    return {name: value.dtype for name, value in made.callback_metrics.items()}


@pytest.mark.parametrize("schedule", ["fill_drain", "1f1b"])
def test_precision_of_what_is_logged(tmp_path: Path, two_ranks: Pool, schedule: str) -> None:
    """Once means over an epoch were in single precision."""
    found, expected = (
        two_ranks.run(types_of_logs, tmp_path, schedule, outputs) for outputs in ("last", "all")
    )

    assert found == expected
    assert expected[0]["single_epoch"] == torch.float64


class Two(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.more = six_layers().double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.more(x)[:, :6]))


def several(root: Path) -> str:
    strategy = {"outputs": "last", "module": ["more", "layers"]}
    made = trainer_over(root, "per_stage", [[3, 3], [3, 3]], strategy, max_epochs=1)
    return said(lambda: made.fit(Two(), datamodule=Data()))


def test_several_modules(tmp_path: Path, two_ranks: Pool) -> None:
    for error in two_ranks.run(several, tmp_path):
        assert "outputs='last' needs one pipelined module" in error


def test_one_process() -> None:
    with pytest.raises(ValueError, match="outputs='last' is for a pipeline of several processes"):
        GPipeStrategy([1, 1], outputs="last")
