"""Backward in two parts, alone: against autograd itself, over drawn graphs.

Here are also the tests of ``split``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.function import Function
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lightning_gpipe.core.run.backward import split
from lightning_gpipe.core.run.backward.leaves import UsedLeaves
from lightning_gpipe.core.run.backward.roots import Graph, root_of
from lightning_gpipe.core.run.backward.split import Splits
from lightning_gpipe.core.run.backward.stage_backward import StageBackward

D = 3


class Scaled(Function):
    """Computes the gradients of both at once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


def hooked(x: Tensor, _: Tensor, weight: Tensor) -> Tensor:
    """Changes the gradient that enters the operator."""
    y = F.linear(x, weight)
    y.register_hook(lambda gradient: gradient.clamp(max=0.1))
    return y


class CompiledFunction(Scaled):
    """Has the name that PyTorch gives to compiled ones."""


# Each makes a value of two values and a weight of the shape (D, D).
OPERATORS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "linear": lambda x, y, w: F.linear(x, w),
    "linear with a bias": lambda x, y, w: F.linear(x, w, w[0]),
    "bias": lambda x, y, w: x + w.diagonal(),
    "same weight as a bias": lambda x, y, w: F.linear(x, w, w.sum(0)),
    "norm": lambda x, y, w: F.layer_norm(x, (D,), w[0], w[1]),
    "scaled weight": lambda x, y, w: F.linear(x, w / w.norm()),
    "two halves": lambda x, y, w: torch.cat([F.linear(x, part) for part in w.split([1, 2])], 1),
    "in Python": lambda x, y, w: Scaled.apply(x, w[0]),
    "compiled": lambda x, y, w: CompiledFunction.apply(x, w[0]),
    "checkpoint": lambda x, y, w: checkpoint(F.linear, x, w, use_reentrant=False),
    "attention": lambda x, y, w: F.scaled_dot_product_attention(x[None], y[None], x[None])[0],
    "tanh": lambda x, y, w: x.tanh(),
    "sum": lambda x, y, w: x + y,
    "product": lambda x, y, w: x * y,
    "first of two": lambda x, y, w: torch.stack([x, y @ w]).unbind()[0],
    "weight alone": lambda x, y, w: w.tanh(),
    "edited in place": lambda x, y, w: F.linear(x, w).relu_(),
    "batched": lambda x, y, w: torch.bmm(x[None], w[None])[0],
    "convolution": lambda x, y, w: F.conv1d(x[None], w[:, :, None])[0],
    "hooked": hooked,
}

Call = tuple[str, int, int, int]
CALLS = st.lists(
    st.tuples(st.sampled_from(sorted(OPERATORS)), *[st.integers(0, 9)] * 3), min_size=1, max_size=9
)


class Drawn:
    """A graph of some calls, with two inputs and four weights."""

    def __init__(self, calls: Sequence[Call]) -> None:
        torch.manual_seed(0)
        leaves = [torch.randn(D, D, dtype=torch.float64, requires_grad=True) for _ in range(6)]
        self.inputs, self.weights = leaves[:2], leaves[2:]
        values = list(self.inputs)
        for name, a, b, w in calls:
            x, y = values[a % len(values)], values[b % len(values)]
            values.append(OPERATORS[name](x, y, self.weights[w % 4]))
            values[-1].retain_grad()
        self.outputs, self.values = values[-2:], values[2:]
        self.roots = [root_of(each) for each in self.outputs]

    def gradients(self) -> list[Tensor | None]:
        return [each.grad for each in (*self.inputs, *self.weights, *self.values)]


def output_gradients(drawn: Drawn, missing: int) -> list[Tensor | None]:
    torch.manual_seed(1)
    found = [torch.randn_like(each) for each in drawn.outputs]
    return [None if k == missing else each for k, each in enumerate(found)]


def whole(calls: Sequence[Call], missing: int) -> tuple[list[Tensor | None], int]:
    """The gradients by autograd, and the floating-point operations."""
    drawn = Drawn(calls)
    pairs = zip(drawn.outputs, output_gradients(drawn, missing), strict=True)
    given = [(x, g) for x, g in pairs if x.requires_grad and g is not None]
    with FlopCounterMode(display=False) as counter:
        if given:
            torch.autograd.backward([x for x, _ in given], [g for _, g in given])
    return drawn.gradients(), counter.get_total_flops()


def assert_close(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    assert [each is None for each in found] == [each is None for each in expected]
    for one, two in zip(found, expected, strict=True):
        if one is not None:
            torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


@given(CALLS, st.integers(0, 3))
def test_both_parts_together_are_the_whole(calls: list[Call], missing: int) -> None:
    drawn = Drawn(calls)
    backward = StageBackward(UsedLeaves(()), Splits())

    with FlopCounterMode(display=False) as counter:
        given = output_gradients(drawn, missing)
        backward.run(0, drawn.inputs, drawn.roots, given)
        inputs = [leaf.grad for leaf in drawn.inputs]
        backward.run_weights(0)

    expected, operations = whole(calls, missing)
    assert_close(inputs, expected[:2])
    assert_close(drawn.gradients(), expected)
    if not any(name == "checkpoint" for name, *_ in calls):
        assert counter.get_total_flops() == operations, "something was computed twice"


LINEAR: Call = ("linear", 0, 0, 0)


def chain(*names: str) -> list[Call]:
    """Each on what the one before returned, with a weight of its own."""
    return [(name, k and k + 1, 0, k) for k, name in enumerate(names)]


def backward_of(drawn: Drawn) -> StageBackward:
    """Runs B."""
    backward = StageBackward(UsedLeaves(()), Splits())
    backward.run(0, drawn.inputs, drawn.roots, output_gradients(drawn, 9))
    return backward


@pytest.mark.parametrize(
    "calls, apart",
    [
        (chain("linear", "tanh", "batched", "convolution"), [0, 2, 3]),
        (chain("linear with a bias", "norm"), [0, 1]),
        (chain("scaled weight", "two halves"), [0, 1]),
        ([LINEAR, ("linear", 2, 0, 0)], [0]),  # a weight that is used twice
        ([("bias", 0, 0, 0), ("bias", 2, 0, 0), ("linear", 3, 0, 1)], [0, 1]),
        (chain("in Python", "linear"), [1]),
        ([("in Python", 0, 0, 0), ("linear", 2, 0, 0)], []),  # and in another way too
        (chain("checkpoint", "linear"), [1]),
        (chain("compiled", "linear"), []),
        (chain("tanh", "sum"), []),
    ],
)
def test_weights_whose_gradients_are_computed_apart(calls: list[Call], apart: list[int]) -> None:
    drawn = Drawn(calls)
    backward = backward_of(drawn)
    first = [weight.grad is not None for weight in drawn.weights]

    backward.run_weights(0)

    both = [weight.grad is not None for weight in drawn.weights]
    assert [k for k in range(4) if both[k] and not first[k]] == apart


def test_all_is_computed_at_once_where_no_input_requires_a_gradient() -> None:
    drawn = Drawn([LINEAR])
    backward = StageBackward(UsedLeaves(()), Splits())

    backward.run(0, [], drawn.roots, output_gradients(drawn, 9))

    assert drawn.weights[0].grad is not None


def test_what_operators_without_weights_have_saved_is_freed_between_the_parts() -> None:
    drawn = Drawn(chain("linear", "tanh", "linear"))
    node: Any = drawn.values[1].grad_fn
    assert isinstance(node._saved_result, Tensor)

    backward = backward_of(drawn)

    with pytest.raises(TypeError, match="NoneType"):
        _ = node._saved_result
    backward.run_weights(0)
    assert_close(drawn.gradients(), whole(chain("linear", "tanh", "linear"), 9)[0])


def test_graphs_of_one_shape_share_a_split(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Graph] = []
    monkeypatch.setattr(split, "find_split", lambda graph: found.append(graph))
    splits = Splits()
    for calls in (chain("linear", "tanh"), chain("linear", "tanh"), chain("linear", "sum")):
        drawn = Drawn(calls)
        splits.of(Graph.behind([root for root in drawn.roots if root], drawn.inputs))

    assert len(found) == 2
