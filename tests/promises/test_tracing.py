"""Nothing silent: recording a pipeline records its layers, as for the plain module.

Here are also the tests of ``tracing``.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_gpipe.core.frontends.install import install
from lightning_gpipe.core.run import Timeline
from tests.support.models import Fork, Join, Through, assert_same, perceptron, rows, step
from tests.support.pipes import Pipe, with_and_without_threads
from tests.support.skip_layers import Pop, Stash, added

pytestmark = [
    with_and_without_threads,
    pytest.mark.parametrize("mode", ["always"]),
    # torch's; on Python 3.14 and later tracing is "not supported" instead of "deprecated".
    pytest.mark.filterwarnings("ignore:`torch.jit.* is (deprecated|not supported)"),
]

EXAMPLE, OTHER = rows(7).detach(), rows(5, seed=1).detach()  # of another number of rows


class Model(nn.Module):
    """Layers to pipeline between two that are not."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.before = nn.Linear(3, 3).double()
        self.layers = layers
        self.after = nn.Linear(3, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.layers(self.before(x)))


def nested() -> nn.Sequential:
    """Layers that pass a tuple and a dict to one another."""
    linear = nn.Linear(3, 3)
    return nn.Sequential(Fork(3), Through(linear), Through(nn.Tanh()), Join()).double()


def skipping() -> nn.Sequential:
    return nn.Sequential(Stash(), nn.Linear(3, 3), nn.Tanh(), Pop(added)).double()


Layers = Callable[[], nn.Sequential]
Record = Callable[[nn.Module], Callable[[Tensor], Tensor]]


def traced(model: nn.Module) -> Any:
    return torch.jit.trace(model, EXAMPLE)


def exported(model: nn.Module) -> Any:
    rows = {0: torch.export.Dim("rows", min=2, max=64)}
    return torch.export.export(model, (EXAMPLE,), dynamic_shapes=(rows,), strict=False).module()


def symbolic(model: nn.Module) -> Any:
    return torch.fx.symbolic_trace(model)


def proxied(model: nn.Module) -> Any:
    return make_fx(lambda x: model(x))(EXAMPLE)


every_record = pytest.mark.parametrize("record", [traced, exported, symbolic, proxied])


def assert_recorded(record: Record, model: nn.Module, plain: nn.Module) -> None:
    """What is recorded of the model computes what the plain one does, on other rows too."""
    found = record(model)

    assert_same(found(EXAMPLE), plain(EXAMPLE))
    assert_same(found(OTHER), plain(OTHER))


@every_record
@pytest.mark.parametrize("layers", [lambda: perceptron(4), nested], ids=["perceptron", "nested"])
def test_model_with_an_installed_pipeline(pipe: Pipe, record: Record, layers: Layers) -> None:
    """Once the recording crashed, in the split or in a worker."""
    plain = Model(layers())
    model = deepcopy(plain)
    pipeline = pipe(model.layers, copy=False)
    install(model.layers, pipeline.forward)

    assert_recorded(record, model, plain)

    assert_same(step(model, rows(7))._asdict(), step(plain, rows(7))._asdict())
    assert isinstance(pipeline.timeline, Timeline)


@every_record
def test_model_with_a_gpipe(pipe: Pipe, record: Record) -> None:
    plain = Model(perceptron(4))
    model = deepcopy(plain)
    model.layers = pipe(model.layers, copy=False)  # type: ignore[assignment]  # used as one

    assert_recorded(record, model, plain)


@pytest.mark.parametrize("record", [traced, symbolic])
def test_gpipe_itself(pipe: Pipe, record: Record) -> None:
    plain = perceptron(4)

    assert_recorded(record, pipe(plain), plain)


@pytest.mark.parametrize("record", [traced, exported, proxied])
def test_skip_connections(pipe: Pipe, record: Record) -> None:
    plain = Model(skipping())
    model = deepcopy(plain)
    install(model.layers, pipe(model.layers, copy=False).forward)

    assert_recorded(record, model, plain)


def test_tensors_without_values(pipe: Pipe) -> None:
    """Once the process ended."""
    pipeline = pipe(perceptron(4))

    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        shape = pipeline(fake.from_tensor(EXAMPLE)).shape

    assert shape == EXAMPLE.shape
