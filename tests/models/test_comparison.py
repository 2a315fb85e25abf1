"""The comparison itself, on models that need no library."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe.core.pipeline import GPipe
from tests.models.case import ROWS, Case
from tests.models.comparison import Comparison
from tests.models.settings import ALL, SOME, Setting
from tests.support.pipes import even

F64 = torch.float64
TRAINING = Setting(2, "except_last", training=True, threads=False)


def rows(generator: torch.Generator) -> dict[str, Tensor]:
    return {"input": torch.randn(ROWS, 4, generator=generator)}


def layers() -> Case:
    """Four linear layers."""
    return Case("layers", lambda: nn.Sequential(*(linear() for _ in range(4))), rows, dtype=F64)


def linear() -> nn.Module:
    return nn.Linear(4, 4)


def of_sequential(model: nn.Module, case: Case, setting: Setting) -> GPipe:
    assert isinstance(model, nn.Sequential)
    return GPipe(
        model,
        even(len(model), setting.stages),
        devices=["cpu"] * setting.stages,
        chunks=3,
        activation_checkpointing=setting.mode,
        deferred_batch_norm=False,
        threads=setting.threads,
    )


@pytest.mark.parametrize("setting", ALL, ids=str)
def test_pipeline_of_layers_is_the_same(setting: Setting) -> None:
    assert Comparison(layers()).difference(setting, of_sequential) is None


@pytest.mark.parametrize("setting", SOME, ids=str)
def test_batch_norms_are_compared_on_micro_batches(setting: Setting) -> None:
    def norm() -> nn.Module:
        return nn.BatchNorm1d(4)

    def build() -> nn.Module:
        return nn.Sequential(linear(), norm(), linear(), norm())

    case = Case("norm", build, rows, dtype=F64, mixes=True)

    assert Comparison(case).difference(setting, of_sequential) is None


def changed(change: Callable[[nn.Module], Any]) -> Callable[..., GPipe]:
    """A pipeline of a model that is not the plain one any more."""

    def make(model: nn.Module, case: Case, setting: Setting) -> GPipe:
        change(model)
        return of_sequential(model, case, setting)

    return make


def more_weight(model: nn.Module) -> None:
    next(model.parameters()).data.mul_(1 + 1e-6)


def other_gradient(model: nn.Module) -> None:
    next(model.parameters()).register_hook(lambda gradient: 1.000001 * gradient)


def no_gradient(model: nn.Module) -> None:
    next(model.parameters()).requires_grad_(False)


def another_buffer(model: nn.Module) -> None:
    model.get_submodule("0").register_buffer("more", torch.zeros(()))


@pytest.mark.parametrize(
    "change, what",
    [
        (more_weight, "output: 1 of 1 differ"),
        (other_gradient, "gradients: 1 of 8 differ, such as '0.weight'"),
        (no_gradient, "'0.weight', which is present in the plain run only"),
        (another_buffer, "the keys of the state dict differ"),
    ],
)
def test_difference_is_reported(change: Callable[[nn.Module], Any], what: str) -> None:
    assert what in str(Comparison(layers()).difference(TRAINING, changed(change)))


def test_settings_cover_what_they_say() -> None:
    assert len(ALL) == 20
    for settings in (ALL, SOME):
        assert {each.stages for each in settings} == {2, 3, 4}
        assert {(each.mode, each.training) for each in settings} == {
            (mode, training)
            for mode in ("never", "except_last", "always")
            for training in (True, False)
        }
        assert {each.threads for each in settings} == {True, False}
