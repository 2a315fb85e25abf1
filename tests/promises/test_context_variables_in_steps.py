"""Transparency: layers find the context variables that a step with a loss for each micro-batch set.

Once the stages had those from before the step: a setting of a library had no effect, silently.
"""

from collections.abc import Callable
from contextvars import ContextVar
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe.core.pipeline import GPipe
from tests.support.models import assert_same, gradients, rows
from tests.support.pipes import Pipe, with_and_without_threads

pytestmark = [with_and_without_threads, pytest.mark.usefixtures("one_intra_op_thread")]

SCALE: ContextVar[Any] = ContextVar("scale", default=1.0)


class Scaled(nn.Linear):
    """Multiplies by what the code around has set."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * SCALE.get()


class Model(nn.Module):
    """Sets the scale for the call of its layers."""

    def __init__(self, scale_of: Callable[["Model", Tensor], Any]) -> None:
        super().__init__()
        self.hyper = nn.Linear(3, 3).double()
        self.layers: nn.Module = nn.Sequential(*[Scaled(3, 3).double() for _ in range(4)])
        self.scale_of = scale_of

    def forward(self, x: Tensor) -> Tensor:
        token = SCALE.set(self.scale_of(self, x))
        y: Tensor = self.layers(x)
        SCALE.reset(token)
        return y


def of_a_condition(model: Model, _: Tensor) -> Tensor:
    return model.hyper(torch.ones(3, dtype=torch.float64)).tanh()


def pair(pipe: Pipe, scale_of: Callable[[Model, Tensor], Any], **options: Any) -> list[Model]:
    """A model with a pipeline, and the plain one."""
    plain = Model(scale_of)
    model = deepcopy(plain)
    layers: Any = model.layers
    model.layers = pipe(layers, copy=False, **options)
    return [model, plain]


def step(model: Model, x: Tensor) -> Tensor:
    return model(x).square().mean()


def by_micro_batch(model: Model, x: Tensor) -> Tensor:
    pipeline: Any = model.layers
    assert isinstance(pipeline, GPipe)
    loss = pipeline.by_micro_batch(lambda x: step(model, x), x, around=model).loss
    assert loss is not None
    return loss


@pytest.mark.parametrize("mode", ["never", "always"])
@pytest.mark.parametrize("scale_of", [lambda *_: 0.5, of_a_condition], ids=["number", "tensor"])
def test_same_for_all_micro_batches(scale_of: Any, mode: Any, pipe: Pipe) -> None:
    model, plain = pair(pipe, scale_of, mode=mode)

    for _ in range(3):
        by_micro_batch(model, rows(7)).backward()
        step(plain, rows(7)).backward()

    assert_same(gradients(model), gradients(plain))
    assert SCALE.get() == 1.0


@pytest.mark.parametrize(
    "scale_of",
    [
        lambda _, x: float(x.detach().mean()),
        lambda _, x: x.detach().mean(),
        lambda _, x: {"here": x.detach().mean(0)},
        lambda _, x: 0.5 if bool((x == rows(7)[0]).all(1).any()) else 1.0,
    ],
    ids=["number", "tensor", "in a dict", "first only"],
)
def test_other_for_a_micro_batch(scale_of: Any, pipe: Pipe) -> None:
    model, _ = pair(pipe, scale_of, mode="never")
    if isinstance(scale_of(model, rows(7)), dict):
        pipeline: Any = model.layers
        for layer in pipeline:
            layer.forward = lambda x: x * SCALE.get()["here"]

    with pytest.raises(RuntimeError, match="got another context variable 'scale' for micro-batch "):
        by_micro_batch(model, rows(7))


def test_set_for_the_first_micro_batch_only(pipe: Pipe) -> None:
    def scale_first(x: Tensor) -> Tensor:
        if bool((x == rows(7)[0]).all(1).any()):
            SCALE.set(0.5)
        y: Tensor = model.layers(x)
        return y.mean()

    model, _ = pair(pipe, lambda *_: 1.0)
    pipeline: Any = model.layers
    with pytest.raises(RuntimeError, match="got another context variable 'scale' for micro-batch "):
        pipeline.by_micro_batch(scale_first, rows(7), around=model)


def test_each_micro_batch_begins_with_the_callers(pipe: Pipe) -> None:
    found = []

    def record(x: Tensor) -> Tensor:
        found.append(SCALE.get())
        SCALE.set(0.5)
        y: Tensor = model.layers(x)
        return y.mean()

    model, _ = pair(pipe, lambda *_: 1.0)
    pipeline: Any = model.layers
    pipeline.by_micro_batch(record, rows(7), around=model)

    assert len(found) > 1
    assert set(found) == {1.0}
