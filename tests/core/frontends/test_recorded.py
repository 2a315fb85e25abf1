"""Promise: what records a model that is no Sequential records its forward as it is."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_gpipe import GPipe, PaddedSequences, Rows
from tests.support.models import assert_same

WIDTH = 4

pytestmark = pytest.mark.filterwarnings(
    # torch's; on Python 3.14 and later tracing is "not supported" instead of "deprecated".
    "ignore:`torch.jit.* is (deprecated|not supported)"
)


class Block(nn.Module):
    """Adds to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + self.linear(x).tanh() * scale


class Looped(nn.Module):
    """Loops over blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.scale)
        return x


class Calls(nn.Module):
    """Calls its children, and reads a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x).relu()
        return self.two(y) * self.scale + y


class Model(nn.Module):
    """Something around a body."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.first(x))


def rows(n: int = 7) -> Tensor:
    return torch.linspace(-1, 1, n * WIDTH, dtype=torch.float64).view(n, WIDTH).sin()


def exported(model: nn.Module) -> Callable[[Tensor], Any]:
    return torch.export.export(model, (rows(),), strict=False).module()


def traced(model: nn.Module) -> Callable[[Tensor], Any]:
    return torch.jit.trace(model, (rows(),), check_trace=False)


def made(model: nn.Module) -> Callable[[Tensor], Any]:
    return make_fx(model)(rows())


def symbolic(model: nn.Module) -> Callable[[Tensor], Any]:
    return torch.fx.symbolic_trace(model)


def piped(kind: str, *, whole: bool, **options: Any) -> tuple[nn.Module, GPipe]:
    torch.manual_seed(0)
    body = Looped() if kind == "looped" else Calls()
    model = (body if whole else Model(body)).double()
    path = {"looped": "body.blocks", "traced": "body"}[kind]
    if whole:
        path = path.removeprefix("body").removeprefix(".")
    balance = [1, 2] if kind == "looped" else [1, 1]
    return model, GPipe(model, balance, module=path, chunks=3, **options)


@pytest.fixture(params=["looped", "traced"])
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    with warnings.catch_warnings():
        yield request.param


@pytest.mark.parametrize("whole", [True, False], ids=["the model", "a part"])
@pytest.mark.parametrize("record", [exported, traced, made, symbolic])
def test_model_with_a_pipeline(kind: str, record: Any, whole: bool) -> None:
    model, pipeline = piped(kind, whole=whole)
    plain = deepcopy(model)

    found = record(model)(rows())

    assert_same(found, plain(rows()))
    seen: list[Any] = []
    pipeline.observe(seen.append)
    assert_same(model(rows()), plain(rows()))
    assert len(seen) == 1, "what records leaves the pipeline as it is"
    pipeline.close()


@pytest.mark.parametrize("record", [exported, traced, made])
def test_pipeline_of_a_model(kind: str, record: Any) -> None:
    model, pipeline = piped(kind, whole=False)
    plain = deepcopy(model)

    assert_same(record(pipeline)(rows()), plain(rows()))
    pipeline.close()


def test_pipeline_of_a_model_is_refused_by_torch_fx(kind: str) -> None:
    _, pipeline = piped(kind, whole=False)

    with pytest.raises(TypeError, match=r"names: got a GPipe around Model. Give it the Model"):
        symbolic(pipeline)
    pipeline.close()


def test_layers_on_several_devices_are_refused(kind: str) -> None:
    model, pipeline = piped(kind, whole=False)
    model.first = nn.Linear(WIDTH, WIDTH, device="meta")

    with pytest.raises(RuntimeError, match=r"on one device: got \['cpu', 'meta'\]. Record a copy"):
        torch.export.export(pipeline, (rows(),), strict=False)


@pytest.mark.parametrize("rows", [Rows(dim=1), Rows(output_dim=1), Rows(dim={"x": 1})], ids=str)
def test_rows_in_another_dim_are_refused(kind: str, rows: Rows) -> None:
    with pytest.raises(ValueError, match=r"Rows\(.*\) is for an nn.Sequential, .* got Model\.body"):
        piped(kind, whole=False, microbatching=rows)


def test_sequences_with_lengths_are_refused(kind: str) -> None:
    padded = PaddedSequences("lengths", trim=["x"], pad_outputs=True)

    with pytest.raises(TypeError, match=r"PaddedSequences needs a batch .* got Model\.body"):
        piped(kind, whole=False, microbatching=padded)
