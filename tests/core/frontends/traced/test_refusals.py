"""What a traced forward must not do: refused with the user's line, or run as one layer."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe.core.frontends.traced import Traced
from tests.support.traced import Tracing, assert_same_run
from tests.support.traced import tracing as tracing  # a fixture
from tests.support.traced_models import Modes

WIDTH = 4


def rows(count: int = 7) -> Tensor:
    return torch.linspace(-1, 1, count * WIDTH, dtype=torch.float64).view(count, WIDTH).sin()


class Model(nn.Module):
    """Two layers, and a function between them that a test gives."""

    scale: Tensor

    def __init__(self, between: Callable[[Model, Tensor], Any]) -> None:
        super().__init__()
        self.between = between
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.steps = 0
        self.seen: list[Any] = []
        self.register_buffer("scale", torch.tensor(2.0))
        self.double()

    def forward(self, x: Tensor) -> Any:
        return self.second(self.between(self, self.first(x)))


def branches(model: Model, x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


def loops(model: Model, x: Tensor) -> Tensor:
    return torch.stack([row + 1 for row in x])


def counts(model: Model, x: Tensor) -> Tensor:
    model.steps += 1
    return x


def remembers(model: Model, x: Tensor) -> Tensor:
    model.seen.append(x)
    return x


def draws(model: Model, x: Tensor) -> Tensor:
    return x + torch.randn(WIDTH)


def draws_in_python(model: Model, x: Tensor) -> Tensor:
    return x * random.random()


def item(model: Model, x: Tensor) -> Tensor:
    return x * float(x.max())


def asks_for_the_class(model: Model, x: Tensor) -> Tensor:
    y = x.max(0)
    return x if isinstance(y, Tensor) else x + y[0]


def length(model: Model, x: Tensor) -> Tensor:
    return x * len(x)


def all_parameters(model: Model, x: Tensor) -> Tensor:
    return x + sum(p.sum() for p in model.parameters())


def divides_by_rows(model: Model, x: Tensor) -> Tensor:
    return x / x.size(0)


def multiplies_by_half_of_the_rows(model: Model, x: Tensor) -> Tensor:
    return (x.shape[0] // 2) * x


def first_half(model: Model, x: Tensor) -> Tensor:
    n = x.shape[0]
    return x[: n // 2]


def adds_numbers_of_rows(model: Model, x: Tensor) -> Tensor:
    return x + torch.arange(x.size(0)).unsqueeze(1)


def divides_by_the_sum(model: Model, x: Tensor) -> Tensor:
    return x / (x.sum() + 1)


def own_module(model: Model, x: Tensor) -> Tensor:
    return nn.Linear(WIDTH, WIDTH)(x)


REFUSED = {
    branches: "control flow",
    loops: "iterated",
    counts: "it changes Model.steps",
    remembers: "it changes Model.seen",
    draws: "draws random numbers",
    draws_in_python: "draws random numbers",
    item: "needs a number",
    asks_for_the_class: "asks for the class of a value",
    length: "length of a value",
    all_parameters: "parameters that it does not read as attributes",
    divides_by_rows: "number of rows .* computes with it",
    multiplies_by_half_of_the_rows: "number of rows .* computes with it",
    first_half: "number of rows .* takes rows by it",
    adds_numbers_of_rows: "number of rows .* counts up to it",
    divides_by_the_sum: "must not compute over all rows",
    own_module: "draws random numbers|is no module of the model",
}


@pytest.mark.parametrize("between", REFUSED, ids=lambda between: between.__name__)
def test_forward_that_cannot_be_traced(between: Callable[..., Any]) -> None:
    model = Model(between)
    before = {name: value for name, value in vars(model).items() if name != "_modules"}
    state = torch.get_rng_state()

    with pytest.raises(TypeError, match=REFUSED[between]) as raised:
        Traced(model, "", model).partitions([1, 1])

    if between not in (counts, remembers, draws_in_python):
        assert "test_refusals.py:" in str(raised.value)
    assert {name: value for name, value in vars(model).items() if name != "_modules"} == before
    assert (model.steps, model.seen) == (0, [])
    assert torch.equal(torch.get_rng_state(), state)


class Inner(nn.Module):
    """Does between two layers of its own what cannot be traced."""

    def __init__(self, between: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.between = between
        self.one = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.between(self, self.one(x)))


class Outer(nn.Module):
    """Calls a module that cannot be traced between two layers."""

    def __init__(self, between: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner = Inner(between)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x)))


def per_row(model: Any, x: Tensor) -> Tensor:
    return torch.stack([row * 2 if float(row.sum().detach()) > 0 else row for row in x])


def test_module_that_cannot_be_traced_is_one_layer(tracing: Tracing) -> None:
    torch.manual_seed(0)
    plain = Outer(per_row)

    assert Traced(plain, "", plain).units == ["first", "inner", "last"]
    assert_same_run(tracing(plain, [1, 2]), plain, rows())


def test_module_that_changes_its_attributes_is_one_layer() -> None:
    model = Outer(counts)

    assert Traced(model, "", model).units == ["first", "inner", "last"]
    assert model.inner.steps == 0


def test_grad_mode_within_a_forward(tracing: Tracing) -> None:
    torch.manual_seed(0)
    plain = Modes()

    assert_same_run(tracing(plain, [2, 1]), plain, rows())


def test_assertion_within_a_forward(tracing: Tracing) -> None:
    with pytest.raises(AssertionError, match="does not hold"):
        tracing(Modes(), [2, 1])(rows().unsqueeze(0))


class Edits(nn.Module):
    """Edits values in place."""

    def __init__(self, edit: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.edit = edit
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.relu = nn.ReLU(inplace=True)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.edit(self, x)


def edit_of_an_earlier_value(model: Any, x: Tensor) -> Tensor:
    a = model.layers[0](x)
    b = model.layers[1](a * 1)
    a += b
    c = model.layers[2](a)
    return model.layers[3](c) + a


def edit_by_index(model: Any, x: Tensor) -> Tensor:
    a = model.layers[0](x)
    b = model.layers[1](a * 1)
    a[:, 0] = b[:, 1]
    return model.layers[3](model.layers[2](b) + a) * a


def edit_by_a_layer(model: Any, x: Tensor) -> Tensor:
    a = model.layers[0](x)
    b = model.layers[1](a * 1)
    model.relu(a)
    return model.layers[3](model.layers[2](b)) * a


def edit_of_a_view(model: Any, x: Tensor) -> Tensor:
    a = model.layers[0](x)
    a[:, 0].mul_(2)
    b = model.layers[1](a * 1)
    return model.layers[3](model.layers[2](b)) * a


@pytest.mark.parametrize(
    "edit",
    [edit_of_an_earlier_value, edit_by_index, edit_by_a_layer, edit_of_a_view],
    ids=lambda edit: edit.__name__,
)
@pytest.mark.parametrize("split", [1, 2, 3])
def test_edits_in_place(tracing: Tracing, edit: Callable[..., Any], split: int) -> None:
    torch.manual_seed(0)
    plain = Edits(edit)
    count = len(Traced(plain, "", plain).units)

    assert_same_run(tracing(plain, [split, count - split]), plain, rows())


def edit_of_a_view_elsewhere(model: Any, x: Tensor) -> Tensor:
    a = model.layers[0](x)
    v = a[:, :2]
    b = model.layers[1](a * 1)
    v += 1
    return model.layers[3](model.layers[2](b)) * a


def test_edit_of_a_tensor_that_another_stage_has(tracing: Tracing) -> None:
    torch.manual_seed(0)
    plain = Edits(edit_of_a_view_elsewhere)

    with pytest.raises(TypeError, match="edited in place .*test_refusals.py:.*test_refusals.py:"):
        tracing(plain, [1, 3])
    assert_same_run(tracing(plain, [2, 2]), plain, rows())
