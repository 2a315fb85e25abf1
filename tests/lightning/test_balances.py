"""A Trainer's balance by time or memory: what it is measured on, and where it is kept.

Here are also the tests of ``entry`` and ``sample``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, random_split

from lightning_gpipe import GPipeStrategy, Rebalance
from lightning_gpipe.core.pipeline.choose.measuring import LayerMeasurement
from tests.support.clocks import Clock, Takes
from tests.support.lightning_modules import (
    FEATURES,
    WIDTH,
    Classifier,
    Data,
    assert_same_weights,
    fitted,
    rows,
    trainer,
    weights,
)


class Slow(Classifier):
    """Whose second layer takes most of the time, by the clock."""

    clock: Clock

    def __init__(self, **options: Any) -> None:
        layers = [nn.Linear(FEATURES, WIDTH), Takes(self.clock, 4.0), *(nn.Tanh() for _ in "abc")]
        super().__init__(layers=nn.Sequential(*layers, Takes(self.clock, 1.0)), **options)


class WithExample(Slow):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.example_input_array = torch.zeros(4, FEATURES)


class Unnumbered(Slow):
    """Whose training step does not take the number of the batch, which Lightning allows."""

    def training_step(self, batch: Any) -> Tensor:  # type: ignore[override]  # it takes less
        return super().training_step(batch, 0)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    Slow.clock = Clock()
    Slow.clock.replace(monkeypatch)
    return Slow.clock


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was measured so far."""
    found: list[Any] = []
    measure = LayerMeasurement.measure

    def counted(self: LayerMeasurement, device: torch.device) -> Any:
        found.append(measure(self, device))
        return found[-1]

    monkeypatch.setattr(LayerMeasurement, "measure", counted)
    return found


class Seen(L.Callback):
    """Remembers the balance and the number of micro-batches."""

    def __init__(self) -> None:
        self.balance: Any = None
        self.chunks: Any = None

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, GPipeStrategy) and strategy.pipeline is not None
        self.balance, self.chunks = strategy.pipeline.balance, strategy.pipeline.chunks


def run(root: Path, balance: Any = "time", **options: Any) -> tuple[Any, L.Trainer]:
    seen = Seen()
    strategy = GPipeStrategy(balance, chunks=2, module="layers")
    made = fitted(root, strategy, devices=2, callbacks=[seen], **{"build": Slow, **options})
    return seen.balance, made


@pytest.mark.parametrize("build", [Slow, Unnumbered, WithExample])
def test_measured_on_an_example_or_the_first_batch(
    tmp_path: Path, build: Any, measured: list[Any]
) -> None:
    balance, _ = run(tmp_path, build=build, max_epochs=1)

    assert balance == [2, 4]
    ((costs,),) = measured
    assert (costs.rows, costs.chunks) == ((2, 2) if build is WithExample else (4, 2))


def test_by_memory_with_the_optimizer_of_the_module(tmp_path: Path, measured: list[Any]) -> None:
    def build() -> Classifier:
        return Classifier(optimizer="adam")

    run(tmp_path, "memory", build=build, max_epochs=1)

    ((costs,),) = measured
    first = costs.layers[0]
    assert first.optimizer_bytes == 2 * first.parameter_bytes + 2 * 4
    assert costs.around.parameters == sum(p.numel() for p in Classifier().head.parameters())


def test_balance_is_printed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, max_epochs=2)

    printed = capsys.readouterr().out
    assert printed.count("┃ stage ┃") == 1 and "ms" in printed


@pytest.mark.parametrize("shuffle", [False, True])
def test_fit_computes_what_it_does_with_the_balance_as_a_list(
    tmp_path: Path, shuffle: bool
) -> None:
    balance, measured = run(tmp_path, shuffle=shuffle)
    _, given = run(tmp_path, balance, shuffle=shuffle)

    assert all(map(torch.equal, weights(measured).values(), weights(given).values()))
    assert_same_weights(measured, fitted(tmp_path, build=Slow, shuffle=shuffle))


class Edits(Classifier):
    """Whose step edits parameters before it calls the layers, in a way that a test chooses."""

    way = ""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(FEATURES, WIDTH).double().requires_grad_(False)

    @torch.no_grad()
    def edit(self) -> None:
        mine, its = next(self.layers.parameters()), self.teacher.weight
        if self.way == "frozen":
            its.lerp_(mine.to(its.device), 0.1)
        elif self.way == "trained":
            mine.mul_(0.9)
        else:
            its.data = its.data * 0.9

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.edit()
        x, y = batch
        distance = self.layers(x) - self.teacher(x)
        return super().training_step((x, y), batch_idx) + distance.square().mean()


MEASURED: dict[str, dict[str, Any]] = {
    "time": {"balance": "time"},
    "memory": {"balance": "memory"},
    "chunks": {"balance": [2, 4], "chunks": "auto"},
    "Rebalance": {"balance": [2, 4]},
}
every_measurement = pytest.mark.parametrize("name", list(MEASURED))


def measured_and_given(root: Path, build: Any, name: str) -> list[L.Trainer]:
    """Trainers after two fits by one balance, of which the first measures the layers."""
    seen = Seen()
    callbacks = [seen, *([Rebalance(2)] if name == "Rebalance" else [])]  # none in two epochs

    def run_with(callbacks: list[Any], **options: Any) -> L.Trainer:
        strategy = GPipeStrategy(**{"chunks": 2, "module": "layers", **options})
        fit: dict[str, Any] = {"build": build, "max_epochs": 2, "callbacks": callbacks}
        return fitted(root, strategy, devices=2, **fit)

    measured = run_with(callbacks, **MEASURED[name])
    return [measured, run_with([], balance=seen.balance, chunks=seen.chunks)]


def assert_equal_weights(one: L.Trainer, other: L.Trainer) -> None:
    assert all(map(torch.equal, weights(one).values(), weights(other).values()))


@pytest.mark.parametrize("way", ["frozen", "trained", "replaced"])
@every_measurement
def test_measuring_leaves_no_edits_of_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, way: str
) -> None:
    """A mean teacher had moved once more before training, in a fit whose layers were measured."""
    monkeypatch.setattr(Edits, "way", way)

    assert_equal_weights(*measured_and_given(tmp_path, Edits, name))


class Transferred(Classifier):
    """Whose hooks on batches keep statistics, draw from a generator, count, and hand on a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES, affine=False).double()
        self.noise = torch.Generator().manual_seed(1)
        self.batches = 0
        self.mask: Any = None

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.batches += 1
        x, y = batch
        self.mask = torch.rand(x.shape, generator=self.noise, dtype=x.dtype).round()
        return x, y

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self.norm(batch[0]), batch[1]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step((batch[0] * self.mask, batch[1]), batch_idx)


@pytest.mark.filterwarnings("ignore:You have overridden `on_(before|after)_batch_transfer`")
@every_measurement
def test_measuring_leaves_nothing_of_hooks_on_batches(tmp_path: Path, name: str) -> None:
    """The statistics, and the generator, had seen a batch more."""
    both = measured_and_given(tmp_path, Transferred, name)

    assert_equal_weights(*both)
    assert len({each.lightning_module.batches for each in both}) == 1


def split_anew(self: Data) -> Any:
    """A dataloader with other rows each time it is made."""
    numbers = [random.random(), np.random.rand()]
    x, y = rows(30, seed=1).tensors
    chosen, _ = random_split(TensorDataset(x + sum(numbers), y), [20, 10])
    return DataLoader(chosen, batch_size=7)


@every_measurement
def test_measuring_draws_no_numbers_for_a_dataloader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The fit had another split than with a list: the call before had drawn from the generator."""
    monkeypatch.setattr(Data, "train_dataloader", split_anew)

    def build() -> Classifier:
        random.seed(0)
        np.random.seed(0)
        return Classifier()

    assert_equal_weights(*measured_and_given(tmp_path, build, name))


class Configured(Classifier):
    """Whose optimizers are made with side effects."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[5] = nn.Dropout(0.5)
        self.made = 0

    def configure_optimizers(self) -> Any:
        self.made += 1
        with torch.no_grad():
            self.head.weight.add_(torch.rand(()))
        return torch.optim.SGD(self.parameters(), lr=0.1 * self.made)


@every_measurement
def test_measuring_leaves_nothing_of_making_optimizers(tmp_path: Path, name: str) -> None:
    both = measured_and_given(tmp_path, Configured, name)

    assert_equal_weights(*both)
    assert [each.lightning_module.made for each in both] == [1, 1]


class ByClosure(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


@pytest.mark.parametrize("options", [{"balance": "memory"}, {"balance": "time", "chunks": "auto"}])
def test_optimizer_that_cannot_be_tried_says_what_to_write(tmp_path: Path, options: Any) -> None:
    """The text named an argument that the strategy does not have."""
    strategy = GPipeStrategy(module="layers", **{"chunks": 2, **options})

    with pytest.raises(ValueError, match="In a Trainer, write balance='time', 'parameters' or a"):
        fitted(tmp_path, strategy, build=ByClosure, devices=2)


class OwnOptimizer(Classifier):
    """Trains its input layer by an optimizer and a scheduler of its own, before the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first = nn.Linear(FEATURES, FEATURES).double()
        self.own = torch.optim.Adam(self.first.parameters(), lr=0.1)
        self.schedules = [torch.optim.lr_scheduler.ExponentialLR(self.own, 0.5)]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.first(x).square().mean().backward()
        self.own.step()
        self.schedules[0].step()
        self.own.param_groups[0]["weight_decay"] += 0.01
        optimizer: Any = self.optimizers()
        loss = super().training_step((self.first(x).detach(), y), batch_idx)
        self.own.zero_grad()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.layers.parameters(), *self.head.parameters()], lr=0.1)


@every_measurement
def test_measuring_leaves_optimizers_of_the_module(tmp_path: Path, name: str) -> None:
    """They had made a step more, and its gradients were added to those of the first batch."""
    both = measured_and_given(tmp_path, OwnOptimizer, name)

    assert_equal_weights(*both)
    ends = []
    for each in both:
        module = each.lightning_module
        assert isinstance(module, OwnOptimizer)
        assert module.schedules[0].optimizer is module.own
        ends.append((module.own.state_dict(), module.schedules[0].state_dict()))
    torch.testing.assert_close(*ends, rtol=0, atol=0)
    assert ends[0][1]["last_epoch"] == 6


class Manual(Slow):
    """Optimizes manually, in the usual order: the optimizers come before the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()
        return loss


class Alternating(Manual):
    """Whose head has an optimizer of its own, which steps before the layers are called."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        of_head, of_layers = self.optimizers()  # type: ignore[attr-defined]  # there are two
        self.toggle_optimizer(of_head)
        self.manual_backward(self.head.weight.square().sum())
        of_head.step()
        of_head.zero_grad()
        self.untoggle_optimizer(of_head)

        def closure() -> Tensor:
            loss = Slow.training_step(self, batch, batch_idx)
            of_layers.zero_grad()
            self.manual_backward(loss)
            return loss

        of_layers.step(closure=closure)
        return of_head.param_groups[0]["params"][0].sum()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(x.parameters(), lr=0.1) for x in (self.head, self.layers)]


@pytest.mark.parametrize("build", [Manual, Alternating])
def test_manual_optimization_is_measured(tmp_path: Path, build: Any, measured: list[Any]) -> None:
    """The optimizers are made after the strategy is set up: the step had found an empty list."""
    balance, by_time = run(tmp_path, build=build, max_epochs=1)
    _, given = run(tmp_path, [2, 4], build=build, max_epochs=1)
    moved = GPipeStrategy([2, 4], chunks=2, module="layers")
    options: dict[str, Any] = {"build": build, "max_epochs": 1, "callbacks": [Rebalance()]}
    rebalanced = fitted(tmp_path, moved, devices=2, **options)

    assert balance == [2, 4] and len(measured) == 2
    for made in (by_time, rebalanced):
        assert_equal_weights(made, given)


def kept_balance(path: Path) -> Any:
    """The balance in a checkpoint; None if it has none."""
    return torch.load(path)["lightning_gpipe"].get("balance")


def test_resumed_run_has_the_balance_of_its_checkpoint(tmp_path: Path, measured: list[Any]) -> None:
    balance, made = run(tmp_path, max_epochs=1)
    made.save_checkpoint(tmp_path / "saved.ckpt")
    assert len(measured) == 1

    again, resumed = run(tmp_path, ckpt_path=tmp_path / "saved.ckpt", max_epochs=2)
    resumed.save_checkpoint(tmp_path / "again.ckpt")

    assert again == balance and len(measured) == 1
    kept = [kept_balance(tmp_path / f"{name}.ckpt") for name in ("saved", "again")]
    assert kept == [{"layers": balance}] * 2


def test_checkpoint_balance(tmp_path: Path, measured: list[Any]) -> None:
    balance, made = run(tmp_path, max_epochs=1)
    made.save_checkpoint(tmp_path / "saved.ckpt")

    again, _ = run(tmp_path, "checkpoint", ckpt_path=tmp_path / "saved.ckpt", max_epochs=2)

    assert again == balance and len(measured) == 1


def test_balance_of_a_checkpoint_for_other_devices_is_not_taken(
    tmp_path: Path, measured: list[Any]
) -> None:
    _, made = run(tmp_path, max_epochs=1)
    made.save_checkpoint(tmp_path / "saved.ckpt")

    strategy = GPipeStrategy("time", chunks=2, module="layers")
    fitted(
        tmp_path,
        strategy,
        devices=3,
        build=Slow,
        max_epochs=2,
        ckpt_path=tmp_path / "saved.ckpt",
    )

    assert len(measured) == 2


@pytest.mark.parametrize(
    "before, after, stages, measurements",
    [
        ({}, {"schedule": "v_half", "chunks": "auto"}, 4, 2),
        ({"schedule": "v_half", "chunks": "auto"}, {"schedule": "zero_bubble"}, 2, 2),
        ({"schedule": "v_half", "chunks": "auto"}, {"schedule": "1f1b", "chunks": 3}, 2, 2),
        ({"schedule": "v_half", "chunks": "auto"}, {"schedule": "1f1b", "chunks": 4}, 4, 1),
        ({"schedule": "v_half", "chunks": "auto"}, {"schedule": "auto", "chunks": "auto"}, 4, 2),
    ],
)
def test_balance_of_a_checkpoint_for_another_schedule_is_not_taken(
    tmp_path: Path,
    before: dict[str, Any],
    after: dict[str, Any],
    stages: int,
    measurements: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was taken if each device had equally many stages, and then refused by the schedule."""
    measured: list[Any] = []
    measure = LayerMeasurement._measured

    def counted(self: LayerMeasurement, *args: Any) -> Any:
        measured.append(measure(self, *args))
        return measured[-1]

    monkeypatch.setattr(LayerMeasurement, "_measured", counted)
    seen = Seen()

    def run_with(settings: dict[str, Any], **options: Any) -> L.Trainer:
        strategy = GPipeStrategy(**{"balance": "time", "chunks": 2, "module": "layers", **settings})
        return fitted(tmp_path, strategy, devices=2, build=Slow, callbacks=[seen], **options)

    run_with(before, max_epochs=1).save_checkpoint(tmp_path / "saved.ckpt")
    run_with(after, max_epochs=2, ckpt_path=tmp_path / "saved.ckpt")

    assert len(seen.balance) == stages and len(measured) == measurements


def test_balance_of_the_fit_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = trainer(tmp_path, GPipeStrategy("time", module="layers"), devices=2, max_epochs=1)
    model = Slow()
    made.fit(model, datamodule=Data())

    with caplog.at_level("INFO"):
        made.validate(model, datamodule=Data(), verbose=False)

    assert "GPipe takes the balance of Slow.layers that it had before: " in caplog.text


def test_balance_that_was_given_is_in_no_checkpoint(tmp_path: Path) -> None:
    _, made = run(tmp_path, [2, 4], max_epochs=1)
    made.save_checkpoint(tmp_path / "saved.ckpt")

    assert kept_balance(tmp_path / "saved.ckpt") is None


def test_evaluation_with_an_example(tmp_path: Path, measured: list[Any]) -> None:
    strategy = GPipeStrategy("time", chunks=2, module="layers")

    trainer(tmp_path, strategy, devices=2).test(WithExample(), datamodule=Data(), verbose=False)

    assert len(measured) == 1


# What is refused.


def test_evaluation_without_an_example_is_refused(tmp_path: Path) -> None:
    made = trainer(tmp_path, GPipeStrategy("time", module="layers"), devices=2)

    with pytest.raises(ValueError, match="outside of a fit, and Slow.example_input_array is None"):
        made.test(Slow(), datamodule=Data(), verbose=False)


def test_checkpoint_without_a_balance_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="balance='checkpoint'.*got none, for the 6 units"):
        run(tmp_path, "checkpoint")


def test_training_step_that_cannot_run_before_the_fit_says_what_to_do(tmp_path: Path) -> None:
    class LogsFirst(Slow):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.log("rows", float(len(batch[0])))
            return super().training_step(batch, batch_idx)

    with pytest.raises(MisconfigurationException, match="log") as raised:
        run(tmp_path, build=LogsFirst)

    assert "Give the LightningModule self.example_input_array" in str(raised.value.__notes__)


def test_model_on_meta_that_reads_values_says_so(tmp_path: Path) -> None:
    """It was advised to have an example, with which the same is raised."""

    class Reads(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.layers.to("meta")
            self.head.to("meta")

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = super().forward(x / float(x.amax()))
            return output

    with pytest.raises(RuntimeError, match="meta") as raised:
        run(tmp_path, build=Reads)

    assert "on meta, where no forward can read the values" in str(raised.value.__notes__)


def test_example_that_does_not_fit_says_so(tmp_path: Path) -> None:
    class Wrong(Slow):
        def __init__(self) -> None:
            super().__init__()
            self.example_input_array = {"images": torch.zeros(1)}

    with pytest.raises(TypeError, match="images") as raised:
        run(tmp_path, build=Wrong)

    assert "a call with example_input_array" in str(raised.value.__notes__)


def test_batches_that_do_not_begin_anew_are_refused(tmp_path: Path) -> None:
    class Stream(IterableDataset[Any], Iterator[Any]):
        def __init__(self) -> None:
            data = rows(20, seed=1)
            self.rows = (data[k] for k in range(len(data)))

        def __iter__(self) -> Iterator[Any]:
            return self

        def __next__(self) -> Any:
            return next(self.rows)

    made = trainer(tmp_path, GPipeStrategy("time", module="layers"), devices=2)

    with pytest.raises(ValueError, match="can begin anew: got Stream, an iterator"):
        made.fit(Slow(), DataLoader(Stream(), 4), Data().val_dataloader())


@pytest.mark.parametrize(
    "options",
    [
        {"balance": "time", "chunks": "auto"},
        {"balance": [2, 4], "schedule": "auto", "split_backward": "auto"},
        {"weights": "auto", "offload_activations": "auto"},
    ],
    ids=str,
)
def test_evaluation_after_a_fit_runs_by_the_plan_of_the_fit(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    strategy = GPipeStrategy(**options, module="layers")
    found: list[Any] = []

    class Plans(L.Callback):
        def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
            found.clear()

        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            found.append(settings(strategy))

        on_test_start = on_predict_start = on_train_start

    made, data = trainer(tmp_path, strategy, devices=2, callbacks=[Plans()], max_epochs=1), Data()
    made.fit(model := Slow(), datamodule=data)
    (planned,) = found
    made.test(model, datamodule=data, verbose=False)
    assert found == [planned]
    made.predict(model, data.val_dataloader())
    assert found == [planned]


def settings(strategy: GPipeStrategy) -> tuple[Any, ...]:
    pipeline = strategy.pipeline
    assert pipeline is not None and strategy._piped is not None
    return pipeline.balances, pipeline.chunks, strategy._piped.schedule


def test_plan_of_a_fit(tmp_path: Path) -> None:
    strategy = GPipeStrategy("time", "auto", module="layers", activation_checkpointing="auto")
    found: list[Any] = []

    class Planned(L.Callback):
        def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            assert strategy.pipeline is not None
            found.append((strategy.pipeline.plan, strategy.pipeline.chunks))

    made = fitted(tmp_path, strategy, devices=2, callbacks=[Planned()], build=Slow, max_epochs=1)

    ((plan, chunks),) = found
    assert plan.settings.balance == (2, 4) and chunks == plan.settings.chunks > 1
    assert_same_weights(made, fitted(tmp_path, build=Slow, max_epochs=1))
