"""Several Trainers with one model, one of them within the fit of another."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_gpipe import GPipeStrategy
from tests.support.lightning_modules import Classifier, Data, assert_same_weights, fitted, trainer

Second = Callable[[], L.Trainer]


class Validates(L.Callback):
    """Validates in the middle of a fit with a Trainer of its own."""

    def __init__(self, second: Second, copied: bool = False) -> None:
        self.second = second
        self.copied = copied
        self.results: list[Any] = []
        self.piped: list[bool] = []  # by batch

    def on_train_batch_end(self, trainer: L.Trainer, model: Any, *_: Any) -> None:
        pipeline = getattr(trainer.strategy, "pipeline", None)
        self.piped.append(pipeline is not None and pipeline.timeline is not None)
        if pipeline is not None:
            pipeline.engine.timeline = None
        if trainer.global_step == 2:
            self.validate(copy_of(model) if self.copied else model)
            model.trainer = trainer  # as on one device

    def validate(self, model: Any) -> None:
        self.results.append(self.second().validate(model, datamodule=Data(), verbose=False))


def copy_of(model: Any) -> Any:
    twin = copy.deepcopy(model)
    twin._metric_attributes = None  # Lightning's cache, by the id of the original's metrics
    return twin


class Refused(Validates):
    """Goes on when the second Trainer is refused."""

    def validate(self, model: Any) -> None:
        with pytest.raises(RuntimeError) as error:
            super().validate(model)
        self.results.append(str(error.value))


def strategy() -> GPipeStrategy:
    return GPipeStrategy([2, 4], chunks=3)


@pytest.mark.parametrize("copied", [False, True], ids=["model", "copy"])
def test_plain_trainer_that_validates_in_mid_fit(tmp_path: Path, copied: bool) -> None:
    callbacks = [Validates(lambda: trainer(tmp_path), copied) for _ in range(2)]
    plain = fitted(tmp_path, callbacks=[callbacks[0]])

    pipelined = fitted(tmp_path, strategy(), devices=2, callbacks=[callbacks[1]])

    assert callbacks[1].piped == [True] * 9
    torch.testing.assert_close(callbacks[1].results, callbacks[0].results)
    assert_same_weights(pipelined, plain)


def test_copy_in_a_pipeline_of_its_own_in_mid_fit(tmp_path: Path) -> None:
    seconds: list[Second] = [
        lambda: trainer(tmp_path),
        lambda: trainer(tmp_path, strategy(), devices=2),
    ]
    callbacks = [Validates(second, copied=True) for second in seconds]
    plain = fitted(tmp_path, callbacks=[callbacks[0]])

    pipelined = fitted(tmp_path, strategy(), devices=2, callbacks=[callbacks[1]])

    assert callbacks[1].piped == [True] * 9
    torch.testing.assert_close(callbacks[1].results, callbacks[0].results)
    assert_same_weights(pipelined, plain)


def test_second_pipeline_of_a_module(tmp_path: Path) -> None:
    """Once its teardown took the first one away, and the rest of the fit ran plain."""
    callback = Refused(lambda: trainer(tmp_path, strategy(), devices=2))
    plain = fitted(tmp_path)

    pipelined = fitted(tmp_path, strategy(), devices=2, callbacks=[callback])

    assert callback.results == [
        "a module has one pipeline at a time: Classifier.layers is in another one, of another "
        "Trainer whose fit or evaluation has not ended, or of a module around or within it. "
        "Evaluate in that Trainer's own loop, or give this one copy.deepcopy(model)."
    ]
    assert callback.piped == [True] * 9
    assert_same_weights(pipelined, plain)


@pytest.mark.parametrize("options", [{"accelerator": "cpu"}, {"accelerator": "auto"}], ids=str)
def test_strategy_of_another_trainer(tmp_path: Path, options: dict[str, Any]) -> None:
    """Once Lightning refused it in words about the accelerator, or two Trainers shared it."""
    taken = strategy()
    first = trainer(tmp_path, taken, devices=2)

    with pytest.raises(RuntimeError, match="belongs to one Trainer.*Write GPipeStrategy"):
        trainer(tmp_path, taken, devices=2, **options)
    first.fit(Classifier(), datamodule=Data())

    assert first.global_step == 9


def test_trainers_one_after_another(tmp_path: Path) -> None:
    def run(make: Callable[[], L.Trainer]) -> list[Any]:
        torch.manual_seed(0)
        model = Classifier()
        made = make()
        made.fit(model, datamodule=Data())
        results = [made.validate(model, datamodule=Data(), verbose=False)]
        results.append(make().test(model, datamodule=Data(), verbose=False))
        return results

    plain = run(lambda: trainer(tmp_path))

    pipelined = run(lambda: trainer(tmp_path, strategy(), devices=2))

    torch.testing.assert_close(pipelined, plain)
