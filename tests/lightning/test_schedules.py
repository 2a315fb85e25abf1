"""Transparency: fits with a loss for each micro-batch equal those of a plain Trainer.

Here are also the tests of ``strategy/micro_batch_steps`` and ``strategy/step_logs``.
"""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import (
    CatMetric,
    CosineSimilarity,
    MeanMetric,
    MeanSquaredError,
    MetricCollection,
    RunningMean,
    SumMetric,
)
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.wrappers import ClasswiseWrapper, Running

from lightning_gpipe import GPipeStrategy, Rows
from lightning_gpipe.core.planner import Plan
from tests.support.faults import OwnError
from tests.support.lightning_modules import (
    CLASSES,
    Classifier,
    Data,
    assert_same_weights,
    fitted,
    rows,
    six_layers,
    trainer,
    weights,
)
from tests.support.models import assert_same

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


# Blocks of three stages, and of six on three devices.
ONE_EACH = [[0, 5], [1, 4], [2, 3]]
FOLDED = [[1, 23, 24], [2, 21, 25], [3, 20, 23], [4, 19, 24], [6, 17, 22], [8, 10, 21]]


def piped(**options: Any) -> dict[str, Any]:
    """The Trainer's arguments for three stages and a loss for each of four micro-batches."""
    folded = options.get("schedule") in ("zero_bubble_v", "v_half", "v_min", FOLDED)
    balance = [1] * 6 if folded else [2, 2, 2]
    return {
        "strategy": GPipeStrategy(balance, 4, **({"schedule": "1f1b"} | options)),
        "devices": 3,
    }


class Embedded(Classifier):
    """With a trained layer before the pipeline, which the loss uses, too."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(6, 6).double()
        self.rate = MulticlassAccuracy(num_classes=3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        x = self.before(x)
        output = self(x)
        loss = F.cross_entropy(output, y) + 0.1 * x.square().mean()
        correct = (output.argmax(1) == y).double().sum()
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("loss, weighed", loss, batch_size=len(x), on_step=True, on_epoch=True)
        self.log("correct", correct, reduce_fx="sum", on_step=True, on_epoch=True)
        self.log("largest", output.max(), reduce_fx="max", on_step=True, on_epoch=True)
        self.log_dict({"smallest": output.min()}, reduce_fx=torch.min)
        self.rate(output, y)
        self.log("rate", self.rate, on_step=True, on_epoch=True)
        return {"loss": loss, "output": output, "names": ["row"] * len(x), "mean": x.mean()}


class Lbfgs(Embedded):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class Clipping(Embedded):
    """Clips by itself, and changes gradients in hooks."""

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(args[0], gradient_clip_val=0.1, gradient_clip_algorithm="norm")

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(1.5)


class Record(Callback):
    """What hooks were called, in which order, and what they were given."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.logged: list[dict[str, float]] = []
        self.outputs: list[dict[str, Any]] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.calls.append("batch start")

    def on_before_zero_grad(self, *args: Any) -> None:
        self.calls.append("zero grad")

    def on_before_backward(self, trainer: L.Trainer, module: L.LightningModule, loss: Any) -> None:
        self.calls.append("before backward")

    def on_after_backward(self, *args: Any) -> None:
        self.calls.append("after backward")

    def on_before_optimizer_step(self, *args: Any) -> None:
        self.calls.append("optimizer step")

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *args: Any
    ) -> None:
        self.calls.append("batch end")
        self.logged.append({k: float(v) for k, v in trainer.callback_metrics.items()})
        self.outputs.append(outputs)


@pytest.mark.parametrize(
    "build, options",
    [
        (Embedded, {}),
        (Embedded, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3}),
        (Embedded, {"accumulate_grad_batches": 3}),
        (Embedded, {"schedule": "zero_bubble"}),
        (Embedded, {"schedule": "zero_bubble_v"}),
        (Embedded, {"schedule": "v_half"}),
        (Embedded, {"schedule": "v_min"}),
        (Embedded, {"schedule": ONE_EACH}),
        (Embedded, {"schedule": FOLDED}),
        (Lbfgs, {}),
        (Clipping, {}),
    ],
    ids=[
        "plain",
        "accumulated and clipped",
        "accumulated by three",
        "zero bubble",
        "zero bubble, V",
        "V-Half",
        "V-Min",
        "block",
        "block, V",
        "LBFGS",
        "hooks",
    ],
)
def test_same_as_a_plain_fit(build: Any, options: dict[str, Any], tmp_path: Path) -> None:
    schedule = options.get("schedule", "1f1b")
    options = {name: value for name, value in options.items() if name != "schedule"}
    records = Record(), Record()
    plain = fitted(tmp_path, build=build, callbacks=[records[0]], **options)
    gpipe = fitted(
        tmp_path, build=build, callbacks=[records[1]], **piped(schedule=schedule), **options
    )

    assert_same_weights(gpipe, plain)
    assert records[1].calls == records[0].calls
    torch.testing.assert_close(records[1].logged, records[0].logged, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gpipe.callback_metrics, plain.callback_metrics)
    for found, expected in zip(*(each.outputs for each in records[::-1]), strict=True):
        assert found["names"] == expected["names"]
        for key in ("loss", "output", "mean"):
            torch.testing.assert_close(found[key], expected[key].detach(), rtol=1e-9, atol=1e-9)


class Naming(L.LightningModule):
    """Returns lists and tuples of the batch, with an entry for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = six_layers().double()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, names = batch
        named = {"names": names[0], "deep": (names[1], [names[0]])}
        return {"loss": self.layers(x).square().mean(), **named}


def test_lists_of_the_batch_are_plain_in_results(tmp_path: Path) -> None:
    """They were of a class of the package, which ``torch.load`` refuses to load."""
    names = [f"row {k}" for k in range(5)], tuple("abcde")
    batch = torch.randn(5, 6, dtype=torch.float64), names
    batches: Any = [batch]
    data: Any = DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch)
    record = Record()
    fit = trainer(tmp_path, callbacks=[record], max_epochs=1, **piped(verify=False))

    fit.fit(Naming(), data)

    [outputs] = record.outputs
    torch.save(outputs, tmp_path / "outputs")
    loaded = torch.load(tmp_path / "outputs")
    assert type(outputs["names"]) is list and loaded["names"] == names[0]
    assert type(outputs["deep"][0]) is tuple and loaded["deep"] == (names[1], [names[0]])


class Sizing(Naming):
    """Returns numbers and tensors that are as large as a micro-batch of two rows."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        [x] = batch
        y = self.layers(x)
        found = {"rows": len(x), "classes": 2, "gram": (y[:, :2].T @ y[:, :2]).detach()}
        return {"loss": y.square().mean(), **found}


def test_results_as_large_as_a_micro_batch(tmp_path: Path) -> None:
    """Constants were added up, and matrices concatenated. The verification has other rows."""
    data = DataLoader(TensorDataset(torch.randn(8, 6, dtype=torch.float64)), batch_size=8)
    record = Record()
    fit = trainer(tmp_path, callbacks=[record], max_epochs=1, **piped())

    with (
        pytest.warns(UserWarning, match=r"must be a tensor: .* in \['classes'\]"),
        pytest.warns(UserWarning, match=r"rows of its micro-batch in dim 0: .* in \['gram'\]"),
    ):
        fit.fit(Sizing(), data)

    [outputs] = record.outputs
    assert (outputs["rows"], outputs["classes"]) == (8, 2)


def test_logs_in_the_precision_of_the_trainer(tmp_path: Path) -> None:
    """Once they were written after the step, where the default dtype is single precision again."""

    class Converted(Embedded):
        def __init__(self) -> None:
            super().__init__()
            self.float()  # until the Trainer converts it

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("third", 1 / 3)
            return super().training_step(batch, batch_idx)

    gpipe, plain = (
        fitted(tmp_path, build=Converted, precision="64-true", **options)
        for options in (piped(), {})
    )

    assert gpipe.callback_metrics.keys() == plain.callback_metrics.keys()
    for name, value in plain.callback_metrics.items():
        torch.testing.assert_close(gpipe.callback_metrics[name], value, rtol=1e-12, atol=0)


@pytest.mark.parametrize("threads", [True, False])
def test_resumed(threads: bool, tmp_path: Path) -> None:
    whole = fitted(tmp_path, build=Embedded, max_epochs=2)
    first = fitted(tmp_path, build=Embedded, max_epochs=1, **piped(threads=threads))
    path = tmp_path / "one epoch.ckpt"
    first.save_checkpoint(path)
    rest = fitted(tmp_path, build=Embedded, max_epochs=2, ckpt_path=path, **piped(threads=threads))

    assert_same_weights(rest, whole)


class Single(Classifier):
    """In single precision."""

    def __init__(self) -> None:
        super().__init__()
        self.float()


def test_gradient_scaler(tmp_path: Path) -> None:
    def fit(**options: Any) -> L.Trainer:
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        plugin = MixedPrecision("16-mixed", "cpu", scaler)
        return fitted(tmp_path, build=Single, plugins=[plugin], **options)

    gpipe, plain = fit(**piped()), fit()
    torch.testing.assert_close(
        dict(gpipe.lightning_module.state_dict()),
        dict(plain.lightning_module.state_dict()),
        rtol=1e-2,  # half precision, of other batch sizes
        atol=1e-2,
    )
    scalers = [each.precision_plugin.scaler for each in (gpipe, plain)]  # type: ignore[attr-defined]  # of MixedPrecision
    assert scalers[0].get_scale() == scalers[1].get_scale() != 64.0


class Positive(Classifier):
    """A mean over some rows, of which micro-batches have different numbers, or none."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        y = y.where(x[:, 0] > 0.4, -100)
        output = self(x)
        loss = F.cross_entropy(output, y, ignore_index=-100)
        some = y >= 0
        correct = (output.argmax(1) == y)[some].double().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("loss by rows", loss, batch_size=len(x), on_step=True, on_epoch=True)
        self.log("correct", correct, on_step=True, on_epoch=True)
        self.log("correct by number", correct, batch_size=int(some.sum()), on_epoch=True)
        return {
            "loss": loss,
            "loss_weight": some.sum(),
            "correct": correct,
            "as float": loss.item(),
        }


class Watching(Classifier):
    """Sees whether old gradients are alive while a step runs."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: list[bool] = []
        own = list(self.parameters())  # in a step shadows are in their places
        self.any_alive = lambda: any(each.grad is not None for each in own)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.alive.append(self.any_alive())
        return super().training_step(batch, batch_idx)


class Looking(Watching):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.global_step:
            assert self.any_alive()


@pytest.mark.parametrize(
    "build, accumulated, alive",
    [
        (Watching, 1, [False, False, False]),
        (Watching, 2, [False, True, False]),
        (Looking, 1, [False, True, True]),
    ],
)
@pytest.mark.filterwarnings("ignore:training_step must leave nothing")
def test_old_gradients_go_early_where_nobody_sees_them(
    build: Any, accumulated: int, alive: list[bool], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"max_epochs": 1, "accumulate_grad_batches": accumulated}
    gpipe = fitted(tmp_path, build=build, **options, **piped())

    found = gpipe.lightning_module
    assert isinstance(found, Watching)
    assert found.alive == [each for each in alive for _ in range(4)]
    assert_same_weights(gpipe, fitted(tmp_path, build=build, **options))


def test_loss_weight(tmp_path: Path) -> None:
    """What was logged and returned beside it was weighted by rows; the mean of no rows was NaN."""
    records = Record(), Record()
    plain = fitted(tmp_path, build=Positive, callbacks=[records[0]])
    gpipe = fitted(tmp_path, build=Positive, callbacks=[records[1]], **piped())

    assert_same_weights(gpipe, plain)
    torch.testing.assert_close(records[1].logged, records[0].logged, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gpipe.callback_metrics, plain.callback_metrics)
    for found, expected in zip(*(each.outputs for each in records[::-1]), strict=True):
        expected = expected | {"loss": expected["loss"].detach()}
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_none_skips_the_batch(tmp_path: Path) -> None:
    class Skipping(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 1 else loss

    assert_same_weights(
        fitted(tmp_path, build=Skipping, **piped()), fitted(tmp_path, build=Skipping)
    )


def test_bf16(tmp_path: Path) -> None:
    gpipe = fitted(tmp_path, build=Single, precision="bf16-mixed", **piped())
    plain = fitted(tmp_path, build=Single, precision="bf16-mixed")
    torch.testing.assert_close(
        dict(gpipe.lightning_module.state_dict()),
        dict(plain.lightning_module.state_dict()),
        rtol=5e-2,
        atol=5e-2,
    )


def test_error_in_the_training_step(tmp_path: Path) -> None:
    class Failing(Classifier):
        failed = False

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 1 and not self.failed:
                self.failed = True
                raise OwnError
            return loss

    model = Failing()
    with pytest.raises(OwnError) as caught:
        trainer(tmp_path, **piped()).fit(model, Data())
    assert "training_step after its call" in "".join(caught.value.__notes__)
    trainer(tmp_path, **piped()).fit(model, Data())


def test_manual_optimization(tmp_path: Path) -> None:
    model = Classifier()
    model.automatic_optimization = False
    with pytest.raises(RuntimeError, match="needs automatic optimization"):
        trainer(tmp_path, **piped()).fit(model, Data())


class Fetching(Classifier):
    """Takes its batches by itself."""

    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
@pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument")
def test_step_that_fetches_its_batches_is_refused(tmp_path: Path) -> None:
    """The message was that the batch has no tensor."""
    with pytest.raises(RuntimeError, match=r"got an iterator, as training_step\(dataloader_iter\)"):
        trainer(tmp_path, **piped()).fit(Fetching(), Data())


@pytest.mark.parametrize(
    "options, schedules",
    [
        ({"schedule": "1f1b"}, {"1f1b"}),
        ({"schedule": "zero_bubble", "activation_checkpointing": "auto"}, {"zero_bubble"}),
        ({"schedule": "auto"}, {"fill_drain", "1f1b", "zero_bubble"}),
        ({"split_backward": "auto", "schedule": "fill_drain"}, {"fill_drain"}),
    ],
)
def test_planned(options: dict[str, Any], schedules: set[str], tmp_path: Path) -> None:
    plain = fitted(tmp_path, build=Embedded)
    strategy = GPipeStrategy("time", "auto", module="layers", **options)
    gpipe = fitted(
        tmp_path, build=Embedded, strategy=strategy, devices=2, callbacks=[chosen := Chosen()]
    )

    assert_same_weights(gpipe, plain)
    assert chosen.plan is not None
    settings = chosen.plan.settings
    block = options["schedule"] == "auto" and not isinstance(settings.order.schedule, str)
    assert block or settings.order.schedule in schedules
    assert chosen.phases == (1 if settings.order.by_micro_batch else 2)
    assert chosen.chunks == settings.chunks


class Chosen(Callback):
    """What was planned, and what ran."""

    plan: Plan | None = None
    phases = chunks = 0

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, GPipeStrategy) and strategy.pipeline is not None
        timeline = strategy.pipeline.timeline
        assert timeline is not None
        self.plan, self.phases = strategy.pipeline.plan, len(timeline.schedule.phases)
        self.chunks = strategy.pipeline.chunks


def test_schedule_is_not_planned_for_manual_optimization(tmp_path: Path) -> None:
    """Its training_step calls backward, with the loss of the batch."""

    class Manual(Embedded):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.example_input_array = torch.zeros(8, 6).double()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx)["loss"])
            optimizer.step()

    strategy = GPipeStrategy("time", "auto", module="layers", schedule="auto")
    fitted(tmp_path, build=Manual, strategy=strategy, devices=2, callbacks=[chosen := Chosen()])

    assert chosen.plan is not None and not chosen.plan.settings.order.by_micro_batch


def test_chunks_that_interleaved_stages_cannot_have(tmp_path: Path) -> None:
    strategy = GPipeStrategy([2, 2, 1, 1], 3, schedule="1f1b")
    with pytest.raises(ValueError, match="a multiple of the number of devices"):
        trainer(tmp_path, strategy, devices=2).fit(Classifier(), Data())


@pytest.mark.parametrize("schedule", [[[0, 3], [1, 2]], [[0, 7], [1, 6], [2, 5], [3, 4]]], ids=len)
def test_block_for_other_stages(tmp_path: Path, schedule: list[list[int]]) -> None:
    strategy = GPipeStrategy([2, 2, 2], 3, schedule=schedule)
    message = f"must have the starts of each stage: got .* of {len(schedule)} stages for 3 stages"
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, strategy, devices=3).fit(Classifier(), Data())


@pytest.mark.parametrize("schedule, expected", [("fill_drain", "except_last"), ("1f1b", "never")])
def test_recomputation_by_default(schedule: Any, expected: str, tmp_path: Path) -> None:
    strategy = GPipeStrategy([3, 3], 2, schedule=schedule)
    found = []

    class Look(Callback):
        def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            assert strategy.pipeline is not None
            found.append(strategy.pipeline.activation_checkpointing)

    trainer(tmp_path, strategy, devices=2, max_epochs=1, callbacks=[Look()]).fit(
        Classifier(), Data()
    )
    assert found == [expected]


def test_rebalanced_in_mid_fit(tmp_path: Path) -> None:
    """The steps kept the pipeline of the first balance, whose layers had other devices."""

    class Rebalancing(Callback):
        def on_train_epoch_start(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.current_epoch == 1:
                strategy = trainer.strategy
                assert isinstance(strategy, GPipeStrategy)
                strategy.rebalance([1, 1, 4])

    gpipe = fitted(tmp_path, build=Embedded, callbacks=[Rebalancing()], **piped())

    assert_same_weights(gpipe, fitted(tmp_path, build=Embedded))


class Measuring(Classifier):
    """With metrics of several kinds, which are given values with a graph."""

    def __init__(self) -> None:
        super().__init__()
        metrics: Any = {"error": MeanSquaredError(squared=False), "angle": CosineSimilarity()}
        self.several = MetricCollection(metrics, prefix="of ")
        self.mean, self.every = MeanMetric(), CatMetric()
        self.largest = MeanSquaredError(squared=False)
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        output = self(x)
        losses = F.cross_entropy(output, y, reduction="none")
        values = self.several(output, output.detach().exp())
        largest = self.largest(output, output.detach().exp())
        self.log_dict({f"value {name}": value for name, value in values.items()}, on_epoch=True)
        self.log("largest", largest, reduce_fx="max", on_step=True, on_epoch=True)
        self.every(losses)
        self.mean(losses.exp())
        self.log_dict(self.several, on_step=True, on_epoch=True)
        self.log_dict({"mean": self.mean, "mean by epoch": self.mean}, on_epoch=True)
        return losses.mean()


def test_metrics_have_the_value_of_the_batch(tmp_path: Path) -> None:
    """They had that of the last micro-batch, in what is logged for each step.

    Values that they returned were averaged: a root of a mean, say, over micro-batches.
    """
    records = Record(), Record()
    plain = trainer(tmp_path, callbacks=[records[0]], max_epochs=1)
    gpipe = trainer(tmp_path, callbacks=[records[1]], max_epochs=1, **piped())
    for made in (plain, gpipe):
        torch.manual_seed(0)
        model = Measuring()
        made.fit(model, Data())
        made.fit_loop.max_epochs = 2
        made.fit(model, Data())  # where metrics have graphs that cannot be copied

    torch.testing.assert_close(records[1].logged, records[0].logged, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gpipe.callback_metrics, plain.callback_metrics)


class Normed(Classifier):
    def __init__(self) -> None:
        super().__init__(layers=nn.Sequential(nn.BatchNorm1d(6), *six_layers()))


def test_epoch_without_backward(tmp_path: Path) -> None:
    """Stochastic weight averaging ends with one, for the statistics of batch norms."""

    def fit(**options: Any) -> L.Trainer:
        averaging = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)
        return fitted(tmp_path, build=Normed, callbacks=[averaging], **options)

    # Of one micro-batch, since batch norms normalise each by its own statistics.
    gpipe = fit(strategy=GPipeStrategy([3, 2, 2], 1, schedule="1f1b"), devices=3)

    assert gpipe.current_epoch == 4
    assert_same_weights(gpipe, fit())


class Keeping(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []
        self.steps, self.flag, self.same = 0, False, [1]
        self.latest: Any = None
        self.largest, self.bias = torch.zeros(3).double(), torch.zeros(3).double()
        self.head.register_buffer("average", torch.zeros(3).double())
        self.head.register_buffer("scale", torch.ones(3).double())
        self.teacher = nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch["x"], batch["y"]
        output = self(x)
        loss = F.cross_entropy(output, y)
        self.flag = False
        self.steps += 1
        self.latest = output.detach()
        self.outputs.append(loss.detach())
        self.largest.copy_(output.detach().amax(0))
        self.head.get_buffer("average").lerp_(output.detach().mean(0), 0.1)
        with torch.no_grad():
            self.teacher.weight.mul_(0.9)
        batch["out"] = output.detach()
        return loss


def test_values_that_a_step_leaves(tmp_path: Path) -> None:
    """They are of the last micro-batch, or counted for each; buffers were not looked at."""

    class Named(Data):
        def train_dataloader(self) -> Any:
            named: Any = [{"x": x, "y": y} for x, y in super().train_dataloader().dataset]
            return DataLoader(named, batch_size=7)

    with pytest.warns(UserWarning, match="must leave nothing") as caught:
        trainer(tmp_path, **piped()).fit(Keeping(), Named())

    [message, later] = [str(x.message) for x in caught if "leave nothing" in str(x.message)]
    assert "each has changed self.latest." in later  # a first step might fill a cache
    for name in ("steps", "outputs", "largest", "head.average", "teacher.weight"):
        assert f"self.{name}" in message
    assert "batch['out']" in message
    for name in ("latest", "flag", "same", "bias", "head.scale", "head.weight", "teacher.bias"):
        assert f"self.{name}" not in message


class Meter:
    def __init__(self) -> None:
        self.total = 0.0

    def add(self, value: Tensor) -> None:
        self.total += float(value)


class Counting(Classifier):
    """Keeps values in places that are not seen at once, and edits a weight of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: dict[str, list[float]] = {"train": []}
        self.meter, self.idle = Meter(), Meter()
        self.total, self.unused = SumMetric(), SumMetric()
        self.mean, self.weighted, self.rowwise = MeanMetric(), MeanMetric(), MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            self.layers.get_parameter("0.weight").clamp_(-0.3, 0.3)
        losses = F.cross_entropy(self(batch[0]), batch[1], reduction="none")
        value = losses.mean().detach()
        self.losses["train"].append(float(value))
        self.meter.add(value)
        self.total.update(value)
        self.mean(value=value)
        self.weighted(value, len(losses))
        self.rowwise(losses.detach())
        return losses.mean()


def test_hidden_values_that_a_step_leaves(tmp_path: Path) -> None:
    """Those of objects, and in containers of containers; sums of single values."""
    with pytest.warns(UserWarning, match="must leave nothing") as caught:
        trainer(tmp_path, **piped(), max_epochs=1).fit(Counting(), Data())

    [message] = [str(each.message) for each in caught if "leave nothing" in str(each.message)]
    changed = "self.layers.0.weight, self.losses, self.mean, self.meter.total, self.total."
    assert f"each has changed {changed}" in message


class Averaging(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.mean(loss.detach())
        self.log("mean of the epoch", self.mean, on_step=False, on_epoch=True)
        return loss


@pytest.mark.parametrize("number, exact", [(20, True), (18, False), (22, False)])
def test_mean_of_losses(tmp_path: Path, number: int, exact: bool) -> None:
    """Batches of 8, 8, and the rest: it is exact where all make four equal micro-batches.

    It was warned of then, too.
    """
    loader = DataLoader(rows(number, seed=1), batch_size=8)
    made = trainer(tmp_path, max_epochs=1), trainer(tmp_path, max_epochs=1, **piped())

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for each in made:
            torch.manual_seed(0)
            each.fit(Averaging(), loader)

    found = [str(each.message) for each in caught if "must leave nothing" in str(each.message)]
    plain, gpipe = (each.callback_metrics["mean of the epoch"] for each in made)
    assert ["has changed self.mean." in message for message in found] == ([] if exact else [True])
    assert torch.isclose(plain, gpipe, rtol=1e-6) == exact


class Recent(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.recent = RunningMean(window=2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.recent.update(loss.detach())
        return loss


def test_running_mean_of_losses(tmp_path: Path) -> None:
    """Its window would be of micro-batches."""
    loader = DataLoader(rows(8, seed=1), batch_size=8)

    with pytest.warns(UserWarning, match=r"has changed self\.recent\."):
        trainer(tmp_path, max_epochs=1, **piped()).fit(Recent(), loader, loader)


class Windowed(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.recent = Running(MulticlassAccuracy(CLASSES), window=2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        y = self(batch[0])
        self.recent(y, batch[1])
        return F.cross_entropy(y, batch[1])


def test_window_of_any_metric(tmp_path: Path) -> None:
    """It was warned of for sums and means only."""
    with pytest.warns(UserWarning, match=r"has changed self\.recent\."):
        trainer(tmp_path, max_epochs=1, **piped()).fit(Windowed(), Data())


class Measured(Classifier):
    """Logs metrics of which two are equal in the first micro-batch, and of single classes."""

    def __init__(self) -> None:
        super().__init__()
        kind = partial(MulticlassAccuracy, CLASSES)
        self.pair = MetricCollection({"all": kind(), "without": kind(ignore_index=0)})
        self.classes = ClasswiseWrapper(kind(average=None))
        self.one = kind(average=None)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        y = self(batch[0])
        self.pair.update(y, batch[1])
        self.log_dict(self.pair, on_step=False, on_epoch=True)
        self.log_dict(self.classes(y, batch[1]), on_step=False, on_epoch=True)
        of_classes = self.one(y, batch[1])
        self.log("first", of_classes[0], on_step=False, on_epoch=True)
        self.log("second", of_classes[1], on_step=False, on_epoch=True)
        return F.cross_entropy(y, batch[1])


def test_groups_of_metrics_and_values_of_classes(tmp_path: Path) -> None:
    """Metrics of one group stay in it, so those of a micro-batch had the values of one another."""
    x = rows(8, seed=1)[:][0]
    targets = torch.tensor([1, 2, 0, 0, 1, 2, 1, 0])  # in micro-batches of two
    loader = DataLoader(TensorDataset(x, targets), batch_size=8)
    made = trainer(tmp_path, max_epochs=2), trainer(tmp_path, max_epochs=2, **piped())
    for each in made:
        torch.manual_seed(0)
        each.fit(Measured(), loader, loader)

    plain, gpipe = (dict(each.callback_metrics) for each in made)
    assert plain["all"] != plain["without"]
    assert_same(gpipe, plain)


class Scheduled(Embedded):
    """Scales its loss by a counter; logs, and has a metric, which change nothing of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        return super().training_step(batch, batch_idx)["loss"] / self.steps


def test_counter_in_the_loss_is_named(tmp_path: Path) -> None:
    """The error told of sums and contrastive losses only."""
    with pytest.raises(RuntimeError, match="The step changes 'steps', of which each micro-batch"):
        trainer(tmp_path, **piped()).fit(Scheduled(), Data())


def test_verification_writes_to_no_logger(tmp_path: Path) -> None:
    class Writing(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert self.logger is not None
            self.logger.log_metrics({"rows": len(batch[0])}, self.global_step)
            return super().training_step(batch, batch_idx)

    class Listed(DummyLogger):
        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            written.extend(value for name, value in metrics.items() if name == "rows")

    written: list[float] = []
    trainer(tmp_path, **piped(), max_steps=1, logger=Listed()).fit(Writing(), Data())

    assert written == [2, 2, 2, 1]


class NormedOutput(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(x)))


def test_batch_norm_around_the_pipeline(tmp_path: Path) -> None:
    """It sees micro-batches, of which the last of each batch had one row, which is an error."""
    with pytest.warns(UserWarning, match="changed self.norm.num_batches_tracked"):
        gpipe = fitted(tmp_path, build=NormedOutput, **piped(microbatching=Rows(at_least=2)))

    assert weights(gpipe)["norm.num_batches_tracked"] == 3 * 3 * 3  # epochs, micro-batches
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        fitted(tmp_path, build=NormedOutput, **piped())


class Masked(nn.Module):
    """A block that keeps the rows that a mask leaves out, if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = torch.tanh(self.linear(x))
        return x + (y if mask is None else y * mask)


class Padded(Classifier):
    """Makes no mask where it would leave out nothing, as transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(6, 8).double()
        self.layers = nn.ModuleList(Masked() for _ in range(6)).double()  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        left_out = x[:, :1] > 0.8
        mask = None if not left_out.any() else (~left_out).double()
        x = self.before(x)
        for layer in self.layers:
            x = layer(x, mask=mask)
        return self.head(x)


@pytest.mark.parametrize("threads", [True, False])
def test_mask_of_some_micro_batches(threads: bool, tmp_path: Path) -> None:
    """The fit ended at the first batch in which some had a mask and others had none."""
    options: dict[str, Any] = {"max_epochs": 1}
    plain = fitted(tmp_path, build=Padded, **options)
    gpipe = fitted(tmp_path, build=Padded, **piped(threads=threads), **options)

    assert_same_weights(gpipe, plain)
