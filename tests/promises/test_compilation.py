"""Nothing silent: torch.compile around a pipeline breaks its graph there, and is correct."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe.core.frontends.install import install
from lightning_gpipe.core.pipeline import GPipe
from tests.support.compilation import Backend, can_compile, counting, has_dynamo
from tests.support.models import assert_same, gradients, perceptron, rows
from tests.support.pipes import Pipe, with_and_without_threads

pytestmark = [
    pytest.mark.skipif(not has_dynamo(), reason="needs torch.compile"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # torch.compile looks
    pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0"),
    with_and_without_threads,
    pytest.mark.parametrize("mode", ["always", "never"]),
]


class Model(nn.Module):
    """Layers to pipeline between two that are not."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.before = nn.Linear(3, 3).double()
        self.layers = layers
        self.after = nn.Linear(3, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.layers(self.before(x)).sin())


class Block(nn.Module):
    """A layer of a class that torch.compile compiles in place, as it does not nn.Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3).double()
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.linear(x)).tanh()


Step = Callable[[nn.Module, Tensor], Tensor]


def step(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).exp().sum()
    loss.backward()
    return loss.detach()


def of_the_layers(model: Any, backend: Backend) -> Step:
    model.layers.compile(backend=backend)
    return step


def of_the_model(model: Any, backend: Backend) -> Step:
    model.compile(backend=backend)
    return step


def of_a_wrapper(model: Any, backend: Backend) -> Step:
    wrapped: Any = torch.compile(model, backend=backend)
    return lambda _, x: step(wrapped, x)


def of_a_step(model: Any, backend: Backend) -> Step:
    return torch.compile(step, backend=backend)


@pytest.fixture
def plain() -> Model:
    torch.manual_seed(0)
    return Model(perceptron(4))


def assert_same_training(compiled: Step, model: nn.Module, plain: nn.Module) -> None:
    """Three steps give the same loss and the same gradients."""
    for seed in range(3):
        model.zero_grad()
        plain.zero_grad()
        assert_same(compiled(model, rows(7, seed=seed)), step(plain, rows(7, seed=seed)))
        assert_same(gradients(model), gradients(plain))


@pytest.mark.parametrize(
    "compilation, pieces",
    [(of_the_layers, 0), (of_the_model, 2), (of_a_wrapper, 2), (of_a_step, 2)],
)
def test_installed_pipeline_in_a_compiled_model(
    pipe: Pipe, plain: Model, compilation: Callable[[Any, Backend], Step], pieces: int
) -> None:
    """Once Dynamo crashed while it traced the engine."""
    graphs: list[int] = []
    model = deepcopy(plain)
    pipeline = pipe(model.layers, copy=False)
    install(model.layers, pipeline.forward)

    compiled = compilation(model, counting(graphs))

    assert_same_training(compiled, model, plain)
    assert len(graphs) >= pieces
    assert pipeline.timeline is not None


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "wrapped"])
def test_compiled_gpipe(pipe: Pipe, plain: Model, in_place: bool) -> None:
    model = deepcopy(plain)
    pipeline: Any = pipe(model.layers, copy=False)
    if in_place:
        pipeline.compile(backend=counting([]))
    else:
        pipeline = torch.compile(pipeline, backend=counting([]))
    model.layers = pipeline

    def unwrapped(_: nn.Module, x: Tensor) -> Tensor:
        return step(model, x)

    for seed in range(3):
        model.zero_grad()
        plain.zero_grad()
        assert_same(unwrapped(model, rows(7, seed=seed)), step(plain, rows(7, seed=seed)))
        found = {name.replace("_orig_mod.", ""): g for name, g in gradients(model).items()}
        assert_same(found, gradients(plain))


@pytest.mark.skipif(not can_compile(), reason="needs modes that torch.compile may ignore")
def test_compiled_layers_in_a_compiled_model(pipe: Pipe) -> None:
    inner: list[int] = []
    outer: list[int] = []
    plain = Model(nn.Sequential(*[Block() for _ in range(3)]))
    model = deepcopy(plain)
    install(model.layers, pipe(model.layers, copy=False).forward)
    backend = counting(inner)
    for layer in model.layers:
        layer.compile(backend=backend)

    compiled = of_the_model(model, counting(outer))

    assert_same_training(compiled, model, plain)
    assert len(inner) >= 3
    assert len(outer) >= 2


def test_whole_graph_is_refused_with_what_to_do(pipe: Pipe) -> None:
    pipeline: GPipe = pipe(perceptron(4))
    compiled: Any = torch.compile(pipeline, backend=counting([]), fullgraph=True)

    with pytest.raises(Exception, match="compile its layers one by one instead"):
        compiled(rows(7))
