"""Forwards that do more than call layers, traced and compared with the plain model.

Here are also the tests of ``lowering``, ``symbolic`` and ``tracer``.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils.checkpoint import checkpoint

from lightning_gpipe import whole
from lightning_gpipe.core.balance import parameter_costs
from lightning_gpipe.core.frontends.traced import TracedForward
from tests.support.pipes import every_mode
from tests.support.traced import Tracing, assert_same_run
from tests.support.traced import tracing as tracing  # a fixture

WIDTH = 4


def rows(count: int = 7, *more: int) -> Tensor:
    shape = (count, *more, WIDTH)
    return torch.linspace(-1, 1, torch.Size(shape).numel(), dtype=torch.float64).view(shape).sin()


class OtherRelu(TorchFunctionMode):
    """Makes torch.relu another function."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return 2 * torch.tanh(*args) if func is torch.relu else func(*args, **(kwargs or {}))


class Model(nn.Module):
    """Layers, and a forward that a test gives."""

    scale: Tensor
    positions: Tensor

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.run = run
        self.factor = 1.0
        self.offsets = [1.0]
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.shift = nn.Parameter(torch.linspace(-1, 1, WIDTH))
        self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.listed = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.row = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.shifts = nn.ParameterList(nn.Parameter(torch.full((WIDTH,), k / 3)) for k in range(3))
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("positions", torch.arange(9.0).view(1, 9, 1))
        self.double()

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, x, *args, **kwargs)


@dataclass
class Output:
    logits: Tensor
    hidden: tuple[Tensor, dict[str, Tensor]]
    name: str = "output"


class Square(torch.autograd.Function):
    """With a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] * gradients[0]


def dataclass_of_nested_values(m: Model, x: Tensor) -> Output:
    a = m.a(x)
    return Output(m.d(m.c(m.b(a))), (a, {"shift": a * m.shift}))


def weight_of_a_layer_on_another_stage(m: Model, x: Tensor) -> Tensor:
    return F.linear(m.d(m.c(m.b(m.a(x)))), m.a.weight, m.shift) * m.shift


def buffer_on_several_stages(m: Model, x: Tensor) -> Tensor:
    return m.d(m.c(m.b(m.a(x) * m.scale)) * m.scale) * m.scale


def input_used_late_and_returned(m: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    return m.d(m.c(m.b(m.a(x)))) + x, x


def parameter_returned(m: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    return m.d(m.c(m.b(m.a(x)))), m.shift


def sizes_as_sizes(m: Model, x: Tensor) -> Tensor:
    y = m.a(x).view(x.size(0), 2, -1).transpose(1, 2).reshape(x.shape)
    return m.d(m.c(m.b(y + torch.zeros(x.shape[0], WIDTH)))).view(x.shape)


def constants_made_in_forward(m: Model, x: Tensor) -> Tensor:
    x = m.b(m.a(x))
    ones = torch.ones(x.size(-1), x.size(-1), device=x.device, dtype=x.dtype)
    index = torch.arange(x.shape[0], device=x.device)
    x = m.c(x @ torch.tril(ones))[index] + torch.tensor([0.0, 1.0, 2.0, 3.0])
    return m.d(x.masked_fill(torch.eye(WIDTH)[0] == 1, 0.5))


def recurrent_layer(m: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    y, (h, _) = m.rnn(m.a(x).unsqueeze(1))
    return m.c(m.b(y[:, -1])), h.squeeze(0)


def containers(m: Any, x: Tensor) -> Tensor:
    for layer, shift in zip(m.listed[1:], m.shifts, strict=True):
        x = torch.tanh(layer(x)) + shift
    for layer in m.row[:2]:
        x = layer(x)
    return m.row[2:](x) + m.listed[0](x)


def reentrant_checkpoint(m: Model, x: Tensor) -> Tensor:
    return m.d(checkpoint(m.row, m.a(x), use_reentrant=True))


def checkpoint_of_a_function(m: Model, x: Tensor) -> Tensor:
    y = checkpoint(lambda z: torch.tanh(m.b(z)) + z, m.a(x), use_reentrant=False)
    return m.d(m.c(y))


def autograd_function(m: Model, x: Tensor) -> Tensor:
    return m.d(m.c(Square.apply(m.b(m.a(x)))))


def module_called_twice(m: Model, x: Tensor) -> Tensor:
    return m.d(m.c(m.a(m.b(m.a(x)))))


def functional_dropout(m: Model, x: Tensor) -> Tensor:
    return m.d(m.c(F.dropout(m.b(m.a(x)), 0.0 if m.training else 0.5, m.training)))


def tuple_used_late(m: Model, x: Tensor) -> Tensor:
    parts = m.a(x).chunk(2, dim=-1)
    return m.d(m.c(m.b(x))) + torch.cat(parts, -1)


def parts_in_another_order(m: Model, x: Tensor) -> Tensor:
    key, value = m.a(x).chunk(2, dim=-1)[::-1]
    first, last = torch.unbind(m.b(torch.cat([key, value], -1)), 1)[:3][::2]
    return m.d(m.c(torch.stack([first, last, last, first], 1)))


def class_of_a_tensor(m: Model, x: Tensor) -> Any:
    y = m.b(m.a(x))
    if not torch.is_tensor(x) or isinstance(y, tuple):
        return y
    match y:
        case Tensor():
            return m.d(m.c(y))
    return y


FORWARDS = [
    dataclass_of_nested_values,
    weight_of_a_layer_on_another_stage,
    buffer_on_several_stages,
    input_used_late_and_returned,
    parameter_returned,
    sizes_as_sizes,
    constants_made_in_forward,
    recurrent_layer,
    containers,
    autograd_function,
    module_called_twice,
    functional_dropout,
    tuple_used_late,
    parts_in_another_order,
    class_of_a_tensor,
]


@every_mode
@pytest.mark.parametrize("run", FORWARDS, ids=lambda run: run.__name__)
def test_same_numbers(tracing: Tracing, run: Callable[..., Any]) -> None:
    plain = Model(run)
    count = len(TracedForward(plain, "").units)

    assert_same_run(tracing(plain, min(4, count)), plain, rows())


@pytest.mark.parametrize(
    "run", [reentrant_checkpoint, checkpoint_of_a_function], ids=lambda run: run.__name__
)
def test_activation_checkpointing_within_is_left_out_with_a_word(
    tracing: Tracing, run: Callable[..., Any]
) -> None:
    plain = Model(run)

    with pytest.warns(UserWarning, match=r"checkpointing of a traced .*test_forwards.py:\d+\."):
        piped = tracing(plain, 2)
    assert_same_run(piped, plain, rows())


def test_hook_on_all_modules_is_told_of(tracing: Tracing) -> None:
    piped = tracing(Model(tuple_used_late), 2)
    hook = register_module_forward_hook(lambda *_: None)

    try:
        with pytest.warns(UserWarning, match="hooks on all modules run with the layers"):
            piped(rows())
        piped(rows())
    finally:
        hook.remove()


def test_calls_of_a_module_called_twice_are_one_unit() -> None:
    model = Model(module_called_twice)

    assert TracedForward(model, "").units == ["a", "c", "d"]


def test_parameter_that_the_forward_reads_counts_where_it_is_first_read() -> None:
    model = Model(weight_of_a_layer_on_another_stage)
    linear = WIDTH * WIDTH + WIDTH

    costs = parameter_costs(TracedForward(model, "").unit_modules)
    assert costs == [linear, linear, linear, linear + WIDTH]


def arguments(m: Model, x: Any, *more: Tensor, scale: float = 1.0, **named: Any) -> Tensor:
    y = m.b(m.a(x["x"] if isinstance(x, dict) else x)) * scale
    for each in more:
        y = y + each
    return m.d(m.c(y)) + named.get("last", 0.0)


def test_any_arguments(tracing: Tracing) -> None:
    plain = Model(arguments)
    piped = tracing(plain, 4)

    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((rows(),), {}),
        ((rows(), rows(), rows()), {"scale": 3.0}),
        (({"x": rows()},), {"last": rows()}),
        (({"x": rows()},), {"last": 2.0, "scale": -1.0}),
    ]
    for args, kwargs in calls:
        torch.testing.assert_close(piped(*args, **kwargs), plain(*args, **kwargs))


def test_attribute_that_changes_between_calls(tracing: Tracing) -> None:
    def scaled(m: Any, x: Tensor) -> Tensor:
        return m.d(m.c(m.b(m.a(x)))) * m.factor + m.offsets[0]

    plain = Model(scaled)
    piped: Any = tracing(plain, 4)
    torch.testing.assert_close(piped(rows()), plain(rows()))

    for model in (plain, piped):
        model.factor = 5.0
    torch.testing.assert_close(piped(rows()), plain(rows()))
    for model in (plain, piped):
        model.offsets[0] = 7.0
    torch.testing.assert_close(piped(rows()), plain(rows()))


class Options:
    """An object of a user's class."""

    def __init__(self, value: Any) -> None:
        self.value = value


@dataclass(slots=True)
class SlottedOptions:
    """An object without a dict of attributes."""

    value: Any


HELD: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], None]]] = {
    "array": (np.ones(1), lambda v: float(v[0]), lambda v: v.put(0, 2.0)),
    "array in a dict": ({"a": np.ones(1)}, lambda v: v["a"][0], lambda v: v["a"].put(0, 2.0)),
    "array in an object": (
        Options(np.ones(1)),
        lambda v: float(v.value[0]),
        lambda v: v.value.put(0, 2.0),
    ),
    "object with slots": (
        SlottedOptions(1.0),
        lambda v: v.value,
        lambda v: setattr(v, "value", 2.0),
    ),
    "object in an object": (
        Options([SlottedOptions(1.0)]),
        lambda v: v.value[0].value,
        lambda v: setattr(v.value[0], "value", 2.0),
    ),
    "list in a dict": (
        {"a": [1.0]},
        lambda v: v["a"][0],
        lambda v: v["a"].__setitem__(0, 2.0),
    ),
    "key of a dict": (
        {1.0: None},
        lambda v: next(iter(v)),
        lambda v: v.update({2.0: v.pop(1.0)}),
    ),
    "tensor": (torch.ones(1), float, lambda v: v.fill_(2.0)),
    "tensor in a list": ([torch.ones(1)], lambda v: float(v[0]), lambda v: v[0].fill_(2.0)),
}


@pytest.mark.parametrize("name", HELD)
def test_attribute_whose_contents_change_between_calls(tracing: Tracing, name: str) -> None:
    """Arrays, ``__slots__``, and all but the first level were constants of the first trace."""
    value, read, change = HELD[name]
    plain: Any = Model(lambda m, x: m.d(m.c(m.b(m.a(x)))) * read(m.held))
    plain.held = deepcopy(value)
    piped: Any = tracing(plain, 4)
    torch.testing.assert_close(piped(rows()), plain(rows()))

    for model in (plain, piped):
        change(model.held)
    torch.testing.assert_close(piped(rows()), plain(rows()))


def test_tensor_that_is_edited_between_calls_is_no_other_constant(tracing: Tracing) -> None:
    """A graph has the tensor itself: it was traced anew after each edit."""
    traces: list[int] = []

    def added(m: Any, x: Tensor) -> Tensor:
        traces.append(1)
        return m.d(m.c(m.b(m.a(x)))) + m.held

    plain: Any = Model(added)
    plain.held = torch.ones(1, dtype=torch.float64)
    piped: Any = tracing(plain, 4)
    piped(rows())
    traces.clear()
    for model in (plain, piped):
        model.held.fill_(2.0)

    torch.testing.assert_close(piped(rows()), plain(rows()))
    assert len(traces) == 1  # of the plain model


def set_rate(model: Any) -> None:
    model.c.rate = 0.5


@pytest.mark.parametrize(
    "reads, change",
    [
        (lambda m, x: x * m.c.rate, set_rate),
        (lambda m, x: x * 2 if m.c.training else x, lambda m: m.c.eval()),
        (
            lambda m, x: x * 2 if m.c.weight.requires_grad else x,
            lambda m: m.c.requires_grad_(False),
        ),
    ],
)
def test_attribute_of_a_layer_that_changes_between_calls(
    tracing: Tracing, reads: Callable[..., Tensor], change: Callable[[Any], None]
) -> None:
    """What a forward read of a layer kept whole stayed what it was in the first call."""
    plain: Any = Model(lambda m, x: m.d(m.c(reads(m, m.b(m.a(x))))))
    plain.c.rate = 1.0
    piped: Any = tracing(plain, 4)
    torch.testing.assert_close(piped(rows()), plain(rows()))

    for model in (plain, piped):
        change(model)
    torch.testing.assert_close(piped(rows()), plain(rows()))
    assert "__getattribute__" not in vars(nn.Module)


def test_layer_that_was_replaced(tracing: Tracing) -> None:
    piped = tracing(Model(sizes_as_sizes), 4)
    piped(rows())
    piped.c = nn.Linear(WIDTH, WIDTH).double()

    with pytest.raises(
        TypeError, match="must stay the same objects: c, called at .*another Linear"
    ):
        piped(rows())


class Block(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.one(x))


class Blocks(nn.Module):
    """Three blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = Block(), Block(), Block()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x)))


def test_hooks_run_with_the_modules_that_they_are_on(tracing: Tracing) -> None:
    plain = Blocks()
    for name in ("", "first", "second.one"):
        plain.get_submodule(name).register_forward_hook(lambda module, args, y: y * 2)
    seen: list[int] = []
    piped = tracing(plain, [2, 3])
    piped.get_submodule("first").register_forward_hook(lambda m, args, y: seen.append(len(y)))
    piped.register_forward_hook(lambda m, args, y: seen.append(len(y)))

    assert TracedForward(plain, "").units == [
        "first",
        *(f"second.{k}" for k in ("one", "other")),
        *(f"third.{k}" for k in ("one", "other")),
    ]
    torch.testing.assert_close(piped(rows()), plain(rows()))
    assert seen == [3, 2, 2, 7]


def test_hook_that_comes_later(tracing: Tracing) -> None:
    plain = Blocks()
    piped = tracing(plain, [3, 3])
    piped(rows())
    for model in (plain, piped):
        model.get_submodule("first").register_forward_hook(lambda module, args, y: y * 2)
    torch.testing.assert_close(piped(rows()), plain(rows()))

    piped.get_submodule("second").register_forward_hook(lambda module, args, y: y * 2)
    with pytest.raises(TypeError, match="with hooks must be on one stage.*: second is on several"):
        piped(rows())


def test_parameter_that_was_replaced(tracing: Tracing) -> None:
    piped = tracing(Model(buffer_on_several_stages), 4)
    shifted = tracing(Model(weight_of_a_layer_on_another_stage), 4)
    piped.scale = torch.tensor(3.0)
    assert torch.isfinite(piped(rows())).all()
    shifted.shift = nn.Parameter(torch.ones(WIDTH))

    with pytest.raises(
        TypeError, match="shift is used on stage 3, .*was not when the model was cut"
    ):
        shifted(rows())


def named(m: Model, x: Tensor, names: Any = None, size: Any = None) -> Tensor:
    return m.d(m.c(m.b(m.a(x))))


@pytest.mark.parametrize(
    "value", [["a"] * 7, ("a",) * 7, np.arange(7)], ids=["list", "str", "array"]
)
def test_argument_with_an_entry_for_each_row(tracing: Tracing, value: Any) -> None:
    piped = tracing(Model(named), 4)
    piped(rows(), size=(7,) * 7)
    piped(rows(), names=["a"] * 6)
    piped(rows(), names=whole(["a"] * 7))

    with pytest.raises(
        ValueError, match="with an entry for each of the 7 rows as argument 'names'"
    ):
        piped(rows(), names=value)


def test_number_that_is_another_in_every_call(tracing: Tracing) -> None:
    piped = tracing(Model(named), 4)

    for k in range(15):
        piped(rows(), size=k)

    with pytest.warns(UserWarning, match="Model has been traced 16 times"):
        piped(rows(), size=15)


def asks_for_keys(m: Model, batch: Any) -> Tensor:
    return m.d(m.c(m.b(m.a(batch.get("x"))))) + batch["y"]


def test_arguments_that_are_known_at_the_call_only(tracing: Tracing) -> None:
    plain = Model(asks_for_keys)
    batch = {"x": rows(), "y": rows()}

    torch.testing.assert_close(tracing(plain, 4)(batch), plain(batch))


class HalfWithin(nn.Module):
    """Runs a layer in another precision than its caller."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        with torch.autocast("cpu", dtype=torch.float16):
            y = self.b(x)
        return self.c(y.float())


def test_autocast_within_another_autocast(tracing: Tracing) -> None:
    """Rows beside others were joined by ``cat``, for which autocast looks for a common type."""
    plain = HalfWithin()
    piped = tracing(plain, 2)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(piped(rows().float()), plain(rows().float()))


def with_a_device(model: Model, x: Tensor) -> Tensor:
    y = model.a(x)
    with torch.device("cpu"):
        y = model.b(y + torch.arange(WIDTH))
        return y * torch.ones(WIDTH, dtype=y.dtype)


def with_another_function(model: Model, x: Tensor) -> Tensor:
    y = model.a(x)
    with OtherRelu():
        y = torch.relu(y)
    return torch.relu(model.b(y) + torch.relu(y))


@every_mode
@pytest.mark.parametrize("run", [with_a_device, with_another_function])
def test_function_modes_in_forward(tracing: Tracing, run: Any) -> None:
    assert_same_run(tracing(Model(run)), Model(run), rows())


@pytest.mark.parametrize("mode", ["always"])
@pytest.mark.parametrize("threads", [True])
def test_forward_that_is_first_called_in_a_function_mode(tracing: Tracing) -> None:
    plain = Model(lambda model, x: torch.relu(model.b(torch.relu(model.a(x)))))
    with OtherRelu():
        model = tracing(plain)
        found, expected = model(rows()), plain(rows())

    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(model(rows()), plain(rows()))


def test_default_device_holds_after_a_trace() -> None:
    """Once torch.device had no effect on torch.ones any more if a traced forward used it first."""
    _device_constructors.cache_clear()
    model = Model(with_a_device)
    TracedForward(model, "")

    with torch.device("meta"):
        assert torch.ones(1).is_meta
        assert torch.tensor(1).is_meta


@every_mode
def test_layer_called_with_a_default_device_runs_with_it(tracing: Tracing) -> None:
    def run(model: Model, x: Tensor) -> Tensor:
        y = model.a(x)
        with torch.device("meta"):
            y = model.b(y)
        return model.c(y)

    piped, seen = tracing(Model(run)), set()
    for name in "abc":

        def hook(*_: Any, name: str = name) -> None:
            seen.add((name, str(torch.get_default_device())))

        piped.get_submodule(name).register_forward_hook(hook)
    piped(rows()).sum().backward()

    assert seen == {("a", "cpu"), ("b", "meta"), ("c", "cpu")}


def test_layer_called_in_a_function_mode_is_refused(tracing: Tracing) -> None:
    def run(model: Model, x: Tensor) -> Tensor:
        with OtherRelu():
            return model.b(model.a(x))

    with pytest.raises(TypeError, match=r"calls a layer in a TorchFunctionMode.*forwards.py:\d+"):
        tracing(Model(run))(rows())


class Doubling(nn.Linear):
    """Has a ``__call__`` of its own around that of nn.Module."""

    def __call__(self, x: Tensor) -> Any:
        return super().__call__(2 * x) + 1


def test_layer_with_a_call_of_its_own(tracing: Tracing) -> None:
    """It was traced through, and run once more in the stage."""
    plain = Model(lambda model, x: model.b(model.a(x)))
    plain.a = Doubling(WIDTH, WIDTH).double()

    assert_same_run(tracing(plain, 2), plain, rows())
