"""Layers move between devices between two epochs, and nothing else changes."""

import math
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_gpipe import GPipeStrategy, LayerProfile, ModelProfile, Rebalance
from lightning_gpipe.callbacks import rebalance as module
from lightning_gpipe.core.balance import LinearCost
from lightning_gpipe.core.pipeline.choose import measuring
from lightning_gpipe.core.profile import Subject
from lightning_gpipe.core.run import Observation
from tests.support.lightning_modules import Classifier, assert_same_weights, fitted, weights
from tests.support.two_stacks import Translator


@pytest.fixture(autouse=True)
def _layers_of_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are measured to cost a second each, so that no test depends on a clock."""

    def profile_layers(subject: Subject, *_: Any, **__: Any) -> list[ModelProfile]:
        second = LinearCost(fixed=1.0)
        layers = tuple(LayerProfile(name, backward=second) for name in subject.names)
        around = LayerProfile("around")
        return [ModelProfile(layers, (), around, rows=2, chunks=2, unit="s", device="cpu")]

    monkeypatch.setattr(measuring, "profile_layers", profile_layers)


class Times:
    """Lets each stage take, in the place of measured times, what a test says.

    Args:
        seconds: For each comparison, the time of each stage, in 10 seconds.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *seconds: list[float]) -> None:
        self.left = list(seconds)
        monkeypatch.setattr(module, "typical", self)

    def __call__(self, observations: list[Observation]) -> list[float]:
        assert observations
        return [10.0 * each for each in self.left.pop(0)]


class Balances(L.Callback):
    """Records the balance of each epoch, and how many state tensors are elsewhere."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_idx == 0:
            assert isinstance(trainer.strategy, GPipeStrategy) and trainer.strategy.pipeline
            self.seen.append(list(trainer.strategy.pipeline.balance))


def run(root: Path, callback: Rebalance | None, **options: Any) -> tuple[list[Any], L.Trainer]:
    seen = Balances()
    strategy = options.pop("strategy", GPipeStrategy([3, 3], chunks=2, module="layers"))
    callbacks = [seen] if callback is None else [callback, seen]
    made = fitted(root, strategy, devices=2, callbacks=callbacks, **{"max_epochs": 3, **options})
    return seen.seen, made


def adam() -> Classifier:
    return Classifier(optimizer="adam", scheduled=True)


def test_weights_are_those_of_the_run_without_it_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Times(monkeypatch, [1, 3], [1, 1])
    callback = Rebalance()

    moved, one = run(tmp_path, callback, build=adam)
    stayed, other = run(tmp_path, None, build=adam)

    assert (moved, stayed) == ([[3, 3], [5, 1], [5, 1]], [[3, 3]] * 3)
    assert all(map(torch.equal, weights(one).values(), weights(other).values()))
    ((epoch, (shift,)),) = callback.shifts
    assert (epoch, shift.after, shift.measured) == (1, (5, 1), 30.0)


def test_several_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The encoder's three blocks, and the decoder's four.
    Times(monkeypatch, [2, 1], [1, 4], [2, 1], [1, 1])
    paths = ["layers.encoder", "layers.decoder"]

    def fit(callback: Rebalance | None) -> tuple[list[Any], L.Trainer]:
        strategy = GPipeStrategy([[2, 1], [2, 2]], chunks=2, module=paths)
        return run(tmp_path, callback, strategy=strategy, build=Translator)

    moved, one = fit(Rebalance())

    assert moved == [[[2, 1], [2, 2]], [[2, 1], [3, 1]], [[2, 1], [3, 1]]]
    # The memory is used by all blocks of the decoder: its gradients are added stage by stage.
    assert_same_weights(one, fit(None)[1])


def test_chain_of_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # All stages of a mini-batch, for each module.
    Times(monkeypatch, [2, 1, 1, 4], [2, 1, 1, 4], [2, 1, 1, 1], [2, 1, 1, 1])
    paths = ["layers.encoder", "layers.decoder"]
    strategy = GPipeStrategy([[2, 1], [2, 2]], chunks=2, module=paths, schedule="1f1b")

    moved, _ = run(tmp_path, Rebalance(), strategy=strategy, build=Translator)

    assert moved == [[[2, 1], [2, 2]], [[2, 1], [3, 1]], [[2, 1], [3, 1]]]


def test_less_than_the_threshold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Times(monkeypatch, [1, 3], [1, 3])
    callback = Rebalance(threshold=0.5)

    balances, _ = run(tmp_path, callback)

    assert balances == [[3, 3]] * 3 and callback.shifts == []


def test_every_second_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Times(monkeypatch, [1, 3])

    balances, _ = run(tmp_path, Rebalance(every_n_epochs=2))

    assert balances == [[3, 3], [3, 3], [5, 1]]


def test_move_that_makes_it_slower_is_undone_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Times(monkeypatch, [1, 3], [5, 1], [1, 3])
    caplog.set_level("INFO", "lightning.pytorch.utilities.rank_zero")

    balances, _ = run(tmp_path, Rebalance(), max_epochs=4)

    assert balances == [[3, 3], [5, 1], [3, 3], [3, 3]]
    assert "balance=[3, 3] becomes [5, 1], 2 layers move" in caplog.text
    assert "takes 50,000 ms per mini-batch, and took 30,000 ms" in caplog.text


def test_balance_that_is_kept_in_checkpoints_is_the_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Times(monkeypatch, [1, 3], [1, 1])
    strategy = GPipeStrategy("time", chunks=2, module="layers")

    _, made = run(tmp_path, Rebalance(), strategy=strategy)
    made.strategy.connect(made.lightning_module)
    made.save_checkpoint(tmp_path / "last.ckpt")

    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)
    assert saved["lightning_gpipe"]["balance"] == {"layers": [5, 1]}


def test_graph_that_is_alive_keeps_the_balance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Keeps(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.kept = self(batch[0])
            return super().training_step(batch, batch_idx)

    Times(monkeypatch, [1, 3], [1, 3])

    with pytest.warns(UserWarning, match="Rebalance keeps the balance: layers must not move"):
        balances, _ = run(tmp_path, Rebalance(), build=Keeps)

    assert balances == [[3, 3]] * 3


@pytest.mark.parametrize(
    "arguments, error, found",
    [
        ({"every_n_epochs": 0}, ValueError, "every_n_epochs must be 1 or more: got 0"),
        ({"every_n_epochs": 1.5}, TypeError, "every_n_epochs must be a whole number: got 1.5"),
        ({"threshold": 0}, ValueError, "threshold must be between 0 and 1"),
        ({"threshold": 10}, ValueError, "got 10. Write 0.1 for 10 %"),
        ({"threshold": math.nan}, ValueError, "got nan"),
        ({"threshold": "10%"}, TypeError, "threshold must be a number: got '10%'"),
    ],
)
def test_bad_arguments(arguments: Any, error: type[Exception], found: str) -> None:
    with pytest.raises(error) as raised:
        Rebalance(**arguments)

    assert found in str(raised.value)


def test_without_a_pipeline(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="Rebalance is for a pipeline: got a Trainer with Single"):
        fitted(tmp_path, "auto", callbacks=[Rebalance()])


def test_strategy_is_cut_anew_in_a_fit_only() -> None:
    with pytest.raises(RuntimeError, match="from setup to teardown"):
        GPipeStrategy([1, 1]).rebalance([1, 1])
