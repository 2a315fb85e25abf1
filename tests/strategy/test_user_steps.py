"""Reported: the pipeline ran, or the user is told."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.core.frontends.install import install
from lightning_gpipe.core.pipeline import PipedModule
from lightning_gpipe.strategy.user_steps import BypassCheck
from tests.support.lightning_modules import (
    Classifier,
    Data,
    assert_same_weights,
    fitted,
    six_layers,
    trainer,
)
from tests.support.models import perceptron, rows

Layers = Callable[[Any, Tensor], Tensor]  # what a model does with its layers


def whole(model: Any, x: Tensor) -> Tensor:
    return model.layers(x)


def loop(model: Any, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x)
    return x


def slices(model: Any, x: Tensor) -> Tensor:
    return model.layers[3:](model.layers[:3](x))


def by_name(model: Any, x: Tensor) -> Tensor:
    for name, _ in model.layers.named_children():
        x = model.get_submodule(f"layers.{name}")(x)
    return x


around = pytest.mark.parametrize("layers", [loop, slices, by_name])


class Stepping(Classifier):
    """Runs its layers in one way in training, and in another in evaluation."""

    def __init__(self, training: Layers, evaluation: Layers = whole) -> None:
        super().__init__()
        self.ways = {True: training, False: evaluation}

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.ways[self.training](self, x))


class Manual(Stepping):
    """Two optimizers, which the training step calls by itself."""

    def __init__(self, training: Layers) -> None:
        super().__init__(training)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        optimizers: Any = self.optimizers()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(each.parameters(), lr=0.1) for each in (self.layers, self.head)]


def strategy() -> GPipeStrategy:
    return GPipeStrategy([2, 4], chunks=3)


def warned(run: Callable[[], object]) -> list[str]:
    """What ``run`` warns of the pipeline."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [text for each in caught if "pipeline" in (text := str(each.message))]


# Training.


@around
@pytest.mark.parametrize("build", [Stepping, Manual])
def test_training_step_that_goes_around_the_pipeline(
    tmp_path: Path, build: Callable[..., L.LightningModule], layers: Layers
) -> None:
    """Once all batches ran plain, without a word."""
    with pytest.raises(RuntimeError) as error:
        fitted(tmp_path, strategy(), build=lambda: build(layers), devices=2)

    assert str(error.value).startswith(
        f"training_step must call {build.__name__}.layers, which runs as a pipeline: it ran the "
        "layers 0, 1, 2, 3, 4, 5 one by one instead, as `for layer in self.layers` and "
        "self.layers[:k](x) do. Write self.layers(x)."
    )


@pytest.mark.parametrize(
    "options", [{"accumulate_grad_batches": 2}, {"num_sanity_val_steps": 0}], ids=str
)
def test_first_batch_is_the_last(tmp_path: Path, options: dict[str, Any]) -> None:
    steps: list[int] = []

    class Counting(Stepping):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            steps.append(batch_idx)

    with pytest.raises(RuntimeError, match="training_step must call Counting.layers"):
        fitted(tmp_path, strategy(), build=lambda: Counting(loop), devices=2, **options)

    assert steps == [0]


def test_error_of_a_step_that_goes_around_the_pipeline_says_so(tmp_path: Path) -> None:
    """On GPUs such a loop fails, since its layers are on several devices."""

    def fails(model: Any, x: Tensor) -> Tensor:
        loop(model, x)
        raise RuntimeError("Expected all tensors to be on the same device")

    with pytest.raises(RuntimeError, match="on the same device") as error:
        fitted(tmp_path, strategy(), build=lambda: Stepping(fails), devices=2)

    (note,) = error.value.__notes__
    assert "training_step must call Stepping.layers" in note


def test_step_that_goes_around_the_pipeline_in_a_later_epoch(tmp_path: Path) -> None:
    def later(model: Any, x: Tensor) -> Tensor:
        return (loop if model.current_epoch else whole)(model, x)

    with pytest.raises(RuntimeError, match="training_step must call Stepping.layers"):
        fitted(tmp_path, strategy(), build=lambda: Stepping(later), devices=2)


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start", "on_train_epoch_start"])
def test_layers_replaced_after_setup(tmp_path: Path, hook: str) -> None:
    class Replacing(Classifier):
        pass

    def replace(model: Any) -> None:
        model.layers = copy.deepcopy(model.layers)

    setattr(Replacing, hook, replace)

    with pytest.raises(RuntimeError, match="Replacing.layers must stay the module that was set up"):
        fitted(tmp_path, strategy(), build=Replacing, devices=2, num_sanity_val_steps=0)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_step_that_skips_a_batch(tmp_path: Path) -> None:
    class Skipping(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) if batch_idx else None

    plain = fitted(tmp_path, build=Skipping)

    def run() -> None:
        assert_same_weights(fitted(tmp_path, strategy(), build=Skipping, devices=2), plain)

    assert warned(run) == []


class Turns(Manual):
    """Trains its head and its layers in turns, the head on what it has got."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        z = self.layers(x) if batch_idx % 2 else F.pad(x, (0, 2))
        self.manual_backward(F.cross_entropy(self.head(z), y))
        for optimizer in self.optimizers():  # type: ignore[union-attr]  # there are two
            optimizer.step()
            optimizer.zero_grad()


def test_step_that_needs_the_layers_in_turns(tmp_path: Path) -> None:
    plain = fitted(tmp_path, build=lambda: Turns(whole))
    found = []

    said = warned(
        lambda: found.append(fitted(tmp_path, strategy(), build=lambda: Turns(whole), devices=2))
    )

    assert_same_weights(found[0], plain)
    assert len(said) == 1 and said[0].startswith("training_step did not run the pipeline")


def test_no_hook_stays_on_the_layers(tmp_path: Path) -> None:
    class Looks(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, model: Any, *_: Any) -> None:
            hooks.extend(len(layer._forward_pre_hooks) for layer in model.layers)

    hooks: list[int] = []

    fitted(tmp_path, strategy(), devices=2, max_steps=1, callbacks=[Looks()])

    assert hooks == [0] * 6


# torch's; on Python 3.14 and later it is "not supported" instead of "deprecated".
@pytest.mark.filterwarnings("ignore:`torch.jit.script.*` is (deprecated|not supported)")
@pytest.mark.parametrize("schedule", ["fill_drain", "1f1b"])
def test_scripted_layers(tmp_path: Path, schedule: Any) -> None:
    """They take no hooks, and their buffers are in no dict: 1F1B raised an AttributeError."""

    def build() -> Classifier:
        model = Classifier()
        model.layers[2].register_buffer("scale", torch.ones(()))
        model.layers[2] = torch.jit.script(model.layers[2])
        return model

    plain = fitted(tmp_path, build=build)

    made = GPipeStrategy([2, 4], chunks=3, schedule=schedule)

    assert_same_weights(fitted(tmp_path, made, build=build, devices=2), plain)


# Evaluation.


@around
@pytest.mark.parametrize("method", ["validate", "test", "predict"])
def test_evaluation_that_goes_around_the_pipeline(
    tmp_path: Path, layers: Layers, method: str
) -> None:
    model = Stepping(whole, layers)
    made = trainer(tmp_path, strategy(), devices=2)

    (said,) = warned(lambda: getattr(made, method)(model, datamodule=Data()))

    name = {"validate": "validation", "test": "test", "predict": "predict"}[method]
    assert said == (
        f"{name}_step did not run the pipeline Stepping.layers. If it loops over self.layers, "
        "takes a slice of it or calls its layers one by one, nothing is pipelined: write "
        "self.layers(x). A copy of it, such as an average of models, runs without a pipeline."
    )


def test_validation_of_a_fit_warns_once(tmp_path: Path) -> None:
    plain = fitted(tmp_path)
    found = []

    said = warned(
        lambda: found.append(
            fitted(tmp_path, strategy(), build=lambda: Stepping(whole, loop), devices=2)
        )
    )

    assert [text.split()[0] for text in said] == ["validation_step"]
    assert_same_weights(found[0], plain)


def test_what_runs_the_pipeline_warns_of_nothing(tmp_path: Path) -> None:
    model = Classifier()

    def run() -> None:
        made = trainer(tmp_path, strategy(), devices=2)
        made.fit(model, datamodule=Data())
        for method in (made.validate, made.test, made.predict):
            method(model, datamodule=Data())

    assert warned(run) == []


# The module that is watched.


def test_module_that_is_itself_the_pipeline() -> None:
    module = perceptron(4)
    piped = PipedModule(module, "", module)

    def run(x: Tensor) -> Tensor:
        piped.runs += 1
        return x

    install(module, run)
    check = BypassCheck(module, piped, [piped])

    check.training(lambda: module(rows(4)), automatic=True)
    check.training(lambda: None, automatic=True)
    with pytest.raises(
        RuntimeError, match=r"training_step must call Sequential, .*Write self\(x\)"
    ):
        check.training(lambda: [layer(rows(4)) for layer in module], automatic=True)


def test_layers_under_a_longer_path(tmp_path: Path) -> None:
    class Nested(Classifier):
        def __init__(self) -> None:
            super().__init__(layers=nn.Sequential())
            del self.layers
            self.net = nn.ModuleDict({"body": six_layers()})
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.net["body"].children():
                x = layer(x)
            return self.head(x)

    with pytest.raises(RuntimeError, match=r"Nested.net.body, .*Write self.net.body\(x\)"):
        fitted(tmp_path, strategy(), build=Nested, devices=2, num_sanity_val_steps=0)
