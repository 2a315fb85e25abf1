"""What a forward sets around the call of a block, and resets: all blocks run at the last call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_gpipe.core.faithful.parameter_slots import ParameterSlots
from tests.support.loops import WIDTH, looped, states
from tests.support.models import assert_same_step

FACTOR = ContextVar("FACTOR", default=1.0)


class Scale:
    """An object that blocks share."""

    def __init__(self) -> None:
        self.factor = 1.0


class Scaled(nn.Module):
    """A block with factors in all places."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.0)
        self.factor = 1.0
        self.tensor = torch.ones(1)
        self.scale = Scale()
        self.factors: list[float] = []

    def forward(self, x: Tensor, factor: Any = 1.0, kept: list[Tensor] | None = None) -> Tensor:
        x = self.dropout(self.linear(x)) * self.factor * self.tensor * self.scale.factor * factor
        if kept is not None:
            kept.append(x)
        return x * sum(self.factors, 1.0) * FACTOR.get()


Loop = Callable[[list[Any], Any], Any]


class Looping(nn.Module):
    """Calls its blocks as a test says."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(4)).double()
        self.loop = loop

    def forward(self, x: Tensor) -> Any:
        return self.loop(list(self.blocks), x)


def attribute(blocks: list[Any], x: Any) -> Any:
    for k, block in enumerate(blocks):
        block.factor = k + 2.0
        x = block(x)
        block.factor = 1.0
    return x


def removed_attribute(blocks: list[Any], x: Any) -> Any:
    for block in blocks:
        block.extra = 2.0
        x = block(x)
        del block.extra
    return x


def tensor_attribute(blocks: list[Any], x: Any) -> Any:
    for block in blocks:
        block.tensor = torch.full((1,), 2.0, dtype=torch.float64)
        x = block(x)
        block.tensor = torch.ones(1)
    return x


def edited_tensor(blocks: list[Any], x: Any) -> Any:
    tensor = torch.ones(1, dtype=torch.float64)
    for block in blocks:
        block.tensor = tensor
        x = block(x)
        tensor += 1
    return x


def shared_object(blocks: list[Any], x: Any) -> Any:
    scale = Scale()
    for block in blocks:
        block.scale = scale
        scale.factor += 1.0
        x = block(x)
    return x


def shared_list(blocks: list[Any], x: Any) -> Any:
    factors: list[float] = []
    for block in blocks:
        block.factors = factors
        x = block(x)
        factors.append(1.0)
    return x


def context_variable(blocks: list[Any], x: Any) -> Any:
    for k, block in enumerate(blocks):
        token = FACTOR.set(k + 2.0)
        x = block(x)
        FACTOR.reset(token)
    return x


def hook(blocks: list[Any], x: Any) -> Any:
    for block in blocks:
        handle = block.linear.register_forward_hook(lambda module, args, output: output * 2)
        x = block(x)
        handle.remove()
    return x


def evaluation(blocks: list[Any], x: Any) -> Any:
    for block in blocks:
        block.dropout.eval()
        x = block(x)
        block.dropout.train()
    return x


def frozen(blocks: list[Any], x: Any) -> Any:
    for block in blocks:
        block.requires_grad_(False)
        x = block(x)
        block.requires_grad_(True)
    return x


def noise(blocks: list[Any], x: Any) -> Any:
    for block in blocks:
        with torch.no_grad():
            block.linear.weight.add_(1.0)
        x = block(x)
        with torch.no_grad():
            block.linear.weight.sub_(1.0)
    return x


def functional(blocks: list[Any], x: Any) -> Any:
    for block in blocks:
        x = functional_call(block, {"linear.weight": block.linear.weight * 2}, (x,))
    return x


def counter(blocks: list[Any], x: Any) -> Any:
    count = torch.ones((), dtype=torch.float64)
    for block in blocks:
        x = block(x, count)
        count += 1
    return x


def counter_between(blocks: list[Any], x: Any) -> Any:
    count = torch.ones((), dtype=torch.float64)
    for block in blocks:
        x = block(x)
        x = x * count
        count += 1
    return x


REFUSED: dict[str, tuple[Loop, str]] = {
    "attribute": (attribute, "factor"),
    "removed attribute": (removed_attribute, "extra"),
    "tensor in an attribute": (tensor_attribute, "tensor"),
    "edited tensor": (edited_tensor, "tensor"),
    "shared object": (shared_object, "scale"),
    "shared list": (shared_list, "factors"),
    "context variable": (context_variable, "'FACTOR'"),
    "hook": (hook, "linear._forward_hooks"),
    "train()": (evaluation, "dropout.training"),
    "requires_grad_()": (frozen, "linear._parameters"),
    "noise on weights": (noise, "linear._parameters"),
    "functional_call": (functional, "linear._parameters"),
    "0-dim tensor": (counter, "argument factor"),
    "0-dim tensor of an operator": (counter_between, "argument argument 1"),
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_another_when_blocks_run(name: str, grad: bool):
    """They ran with what was there at the last call, without a word."""
    loop, changed = REFUSED[name]
    if name == "requires_grad_()" and not grad:
        pytest.skip("makes no difference")
    expected = rf"must see .*{changed}.* changed after its call at .*test_forward_state.py:\d+"
    model = Looping(loop)
    with looped(model), torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match=expected):
        model(states())


def set_and_left(blocks: list[Any], x: Any) -> Any:
    for k, block in enumerate(blocks):
        block.factor, block.scale.factor = 1 / (k + 2), 0.5
        block.tensor = torch.full((1,), 0.5 + k / 8, dtype=torch.float64)
        block.dropout.train(k % 2 == 0)
        x = block(x, torch.tensor(1.0 - k / 8, dtype=torch.float64))
    return x


def set_around_the_loop(blocks: list[Any], x: Any) -> Any:
    token = FACTOR.set(2.0)
    for block in blocks:
        x = block(x)
    FACTOR.reset(token)
    return x


def later_worker_begins(blocks: list[Any], x: Any) -> Any:
    """The worker of these blocks puts its shadows in, while a chain calls its second module."""
    linears = [block.linear for block in blocks]
    before = [linear._parameters for linear in linears]
    for block in blocks:
        x = block(x)
        if block is blocks[0]:
            for linear in linears:
                vars(linear)["_parameters"] = ParameterSlots(linear._parameters, lambda: True)
    for linear, slots in zip(linears, before, strict=True):
        vars(linear)["_parameters"] = slots
    return x


class Counting(nn.BatchNorm1d):
    """Edits buffers and attributes in forward, also while it is tried on a few rows."""

    def __init__(self) -> None:
        super().__init__(5)
        self.total = torch.zeros((), dtype=torch.float64)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.total += 1
        return x + super().forward(x)


@pytest.mark.parametrize("loop", [set_and_left, set_around_the_loop, later_worker_begins])
def test_what_stays_until_blocks_run(loop: Loop):
    plain = Looping(loop)
    model = copy.deepcopy(plain)
    with looped(model):
        assert_same_step(model, plain, states())
        assert_same_step(model, plain, states(rows=4))


def test_blocks_that_edit_their_own_state():
    model = Looping(set_around_the_loop)
    for block in model.blocks:
        block.dropout = Counting().double()
    with looped(model):
        for rows in (7, 4):
            model(states(rows)).sum().backward()


def test_list_to_which_blocks_append():
    """It stayed empty: each micro-batch got a list of its own."""
    kept: list[Tensor] = []

    def loop(blocks: list[Any], x: Any) -> Any:
        for block in blocks:
            x = block(x, kept=kept)
        return x

    model = Looping(loop)
    expected = (
        r"must not change a list or dict .*blocks.0 \(.*test_forward_state.py:\d+\) changed one"
    )
    with looped(model), pytest.raises(TypeError, match=expected):
        model(states())
    assert not kept
