"""A model built on the meta device gets its memory stage by stage, and a checkpoint's weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_gpipe import GPipeStrategy
from tests.support.lightning_modules import (
    CLASSES,
    WIDTH,
    Classifier,
    Data,
    assert_same_weights,
    fitted,
    six_layers,
    trainer,
    weights,
)


class Metricless(Classifier):
    """Nothing that keeps values outside of parameters and buffers, which meta would lose."""

    def __init__(self, layers: nn.Sequential | None = None) -> None:
        super().__init__(layers=layers)
        del self.accuracy

    def _evaluate(self, batch: Any, stage: str) -> None:
        x, y = batch
        self.log(f"{stage}_loss", F.cross_entropy(self(x), y))


class Late(Metricless):
    """Builds everything in configure_model, on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        del self.layers, self.head

    def configure_model(self) -> None:
        if not hasattr(self, "layers"):
            with torch.device("meta"):
                self.layers = six_layers().double()
                self.head = nn.Linear(WIDTH, CLASSES, dtype=torch.float64)


class Buffered(nn.Module):
    """Parameters and a buffer that are not their initial value after a step."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(WIDTH))
        self.calls = nn.Buffer(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)
        nn.init.zeros_(self.calls)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def in_init_module(made: L.Trainer) -> Classifier:
    with made.init_module(empty_init=True):
        model = Metricless()
    assert all(p.is_meta for p in model.parameters())
    return model


def in_configure_model(_: L.Trainer) -> Classifier:
    return Late()


BUILDS = pytest.mark.parametrize("build", [in_init_module, in_configure_model])
Build = Callable[[L.Trainer], Classifier]


@BUILDS
def test_fit(tmp_path: Path, build: Build) -> None:
    made = trainer(tmp_path, GPipeStrategy([2, 4], 4), devices=2)
    torch.manual_seed(0)
    model = build(made)

    made.fit(model, datamodule=Data())

    assert made.global_step == 9
    for name, value in weights(made).items():
        assert value.device.type == "cpu" and value.isfinite().all(), name
    first = weights(made)["layers.0.weight"]
    assert 0.05 < first.abs().mean() < 1, "reset_parameters of nn.Linear was called"


@BUILDS
def test_resume_has_the_weights_of_the_checkpoint(tmp_path: Path, build: Build) -> None:
    whole = fitted(tmp_path, build=Metricless, max_epochs=4)
    fitted(tmp_path, build=Metricless, max_epochs=2).save_checkpoint(tmp_path / "half.ckpt")
    made = trainer(tmp_path, GPipeStrategy([2, 4], 4), devices=2, max_epochs=4)

    made.fit(build(made), datamodule=Data(), ckpt_path=tmp_path / "half.ckpt")

    assert_same_weights(made, whole)


@BUILDS
def test_evaluation_has_the_weights_of_the_checkpoint(tmp_path: Path, build: Build) -> None:
    plain = fitted(tmp_path, build=Metricless)
    plain.save_checkpoint(tmp_path / "end.ckpt")
    expected = trainer(tmp_path).validate(plain.lightning_module, datamodule=Data(), verbose=False)
    made = trainer(tmp_path, GPipeStrategy([2, 4], 4), devices=2)

    found = made.validate(
        build(made), datamodule=Data(), ckpt_path=tmp_path / "end.ckpt", verbose=False
    )

    torch.testing.assert_close(found, expected)


def test_no_memory_before_setup(tmp_path: Path) -> None:
    class Looks(L.Callback):
        def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
            seen.append({p.device.type for p in pl_module.layers.parameters()})

        def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
            seen.append({p.device.type for p in pl_module.layers.parameters()})

    seen: list[set[str]] = []
    made = trainer(
        tmp_path, GPipeStrategy([2, 4]), devices=2, callbacks=[Looks()], fast_dev_run=True
    )

    made.fit(in_init_module(made), datamodule=Data())

    assert seen == [{"meta"}, {"cpu"}]


def test_buffers_are_initialised(tmp_path: Path) -> None:
    made = trainer(tmp_path, GPipeStrategy([1, 1]), devices=2, fast_dev_run=True)
    with made.init_module(empty_init=True):
        model = Metricless(layers=nn.Sequential(nn.Linear(6, WIDTH), Buffered()))

    made.fit(model, datamodule=Data())

    assert isinstance(model.layers[1], Buffered)
    assert model.layers[1].calls == 0


def test_layer_without_reset_parameters(tmp_path: Path) -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    made = trainer(tmp_path, GPipeStrategy([1, 1]), devices=2)
    with made.init_module(empty_init=True):
        model = Metricless(layers=nn.Sequential(nn.Linear(6, WIDTH), Bare()))

    with pytest.raises(TypeError, match=r"must have reset_parameters\(\).*got Bare without"):
        made.fit(model, datamodule=Data())


def test_init_module_with_memory(tmp_path: Path) -> None:
    made = trainer(tmp_path, GPipeStrategy([2, 4], 4), devices=2)
    torch.manual_seed(0)
    with made.init_module():
        model = Metricless()
    assert {p.device.type for p in model.parameters()} == {"cpu"}

    made.fit(model, datamodule=Data())

    assert_same_weights(made, fitted(tmp_path, build=Metricless))


class Masked(nn.Module):
    """A parameter, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.mask = nn.Buffer(torch.empty(WIDTH, WIDTH), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        with torch.no_grad():
            self.mask.copy_(torch.ones(WIDTH, WIDTH).tril())

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight * self.mask)


def masked() -> Metricless:
    return Metricless(layers=nn.Sequential(nn.Linear(6, WIDTH), Masked(), nn.Tanh()))


def test_resume_of_tied_weights(tmp_path: Path) -> None:
    """Once each name got a parameter of its own, so that the weights were tied no longer."""

    def tied() -> Metricless:
        model = Metricless(
            layers=nn.Sequential(nn.Linear(6, WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        )
        model.layers[3].weight = model.layers[1].weight
        return model.double()

    whole = fitted(tmp_path, build=tied, max_epochs=4)
    fitted(tmp_path, build=tied, max_epochs=2).save_checkpoint(tmp_path / "half.ckpt")
    made = trainer(tmp_path, GPipeStrategy([2, 2], 4), devices=2, max_epochs=4)
    with made.init_module(empty_init=True):
        model = tied()

    made.fit(model, datamodule=Data(), ckpt_path=tmp_path / "half.ckpt")

    assert model.layers[3].weight is model.layers[1].weight
    assert_same_weights(made, whole)


def test_resume_of_a_module_with_a_buffer_that_is_not_saved(tmp_path: Path) -> None:
    """Once the whole module was initialised again to make the buffer: loaded weights were lost."""
    whole = fitted(tmp_path, build=masked, max_epochs=4)
    fitted(tmp_path, build=masked, max_epochs=2).save_checkpoint(tmp_path / "half.ckpt")
    made = trainer(tmp_path, GPipeStrategy([1, 2], 4), devices=2, max_epochs=4)
    with made.init_module(empty_init=True):
        model = masked()

    made.fit(model, datamodule=Data(), ckpt_path=tmp_path / "half.ckpt")

    assert_same_weights(made, whole)


def test_parameter_of_the_module_itself_without_reset_parameters(tmp_path: Path) -> None:
    made = trainer(tmp_path, GPipeStrategy([2, 4]), devices=2)
    with made.init_module(empty_init=True):
        model = Metricless()
        model.temperature = nn.Parameter(torch.ones(()))

    with pytest.raises(TypeError, match=r"must have reset_parameters\(\).*got Metricless without"):
        made.fit(model, datamodule=Data())


def test_metric_on_meta(tmp_path: Path) -> None:
    made = trainer(tmp_path, GPipeStrategy([2, 4]), devices=2)
    with made.init_module(empty_init=True):
        model = Classifier()

    with pytest.raises(ValueError, match=r"cannot be built on the meta device: got accuracy\."):
        made.fit(model, datamodule=Data())


def test_checkpoint_of_another_dtype(tmp_path: Path) -> None:
    fitted(tmp_path, build=lambda: Metricless().float()).save_checkpoint(tmp_path / "end.ckpt")
    made = trainer(tmp_path, GPipeStrategy([2, 4]), devices=2)
    model = in_init_module(made)

    made.validate(model, datamodule=Data(), ckpt_path=tmp_path / "end.ckpt", verbose=False)

    assert {value.dtype for value in weights(made).values()} == {torch.float64}
