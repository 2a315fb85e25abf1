"""One autograd node: hooks that a layer registers in forward run once per micro-batch.

Recomputation runs the forward again and registers them again, which must not make them act twice.
They are linear in the gradient, so the micro-batches add up to what one mini-batch gives.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.utils import prune

from tests.support.hooks import (
    LAYERS,
    assert_same_twice,
    doubled,
    every_mode_and_one_without_threads,
    six_layers,
)
from tests.support.models import Call, assert_same, perceptron, rows, step
from tests.support.pipes import Pipe

pytestmark = every_mode_and_one_without_threads


@pytest.fixture
def plain() -> nn.Sequential:
    return six_layers()


def on_its_input(x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: gradient * 2)
    return x.sin()


def on_its_output(x: Tensor) -> Tensor:
    y = x.sin()
    y.register_hook(lambda gradient: gradient * 2)
    return y


def between(x: Tensor) -> Tensor:
    y = x * 3
    y.register_hook(lambda gradient: gradient * 2)
    return y.sin()


def on_a_node(x: Tensor) -> Tensor:
    y = x.sin()
    assert y.grad_fn is not None
    y.grad_fn.register_prehook(doubled)
    y.grad_fn.register_hook(lambda inner, _: doubled(inner))
    return y


TENSOR_HOOKS: list[Callable[[Tensor], Tensor]] = [on_its_input, on_its_output, between, on_a_node]


@pytest.mark.parametrize("k", range(LAYERS))
@pytest.mark.parametrize("function", TENSOR_HOOKS, ids=lambda function: function.__name__)
def test_hook_that_a_layer_registers(
    plain: nn.Sequential, pipe: Pipe, function: Callable[[Tensor], Tensor], k: int
) -> None:
    """Once recomputation ran on forward's own input, which had a hook already: it acted twice."""
    plain[k] = Call(function)

    assert_same_twice(pipe(plain), plain)


@pytest.mark.parametrize("k", [0, 2, 3])
def test_hook_that_a_forward_hook_registers(plain: nn.Sequential, pipe: Pipe, k: int) -> None:
    def on_both(_: nn.Module, x: tuple[Tensor], y: Tensor) -> None:
        for tensor in (*x, y):
            tensor.register_hook(lambda gradient: gradient * 2)

    plain[k].register_forward_hook(on_both)

    assert_same_twice(pipe(plain), plain)


def test_hook_on_several_tensors_of_a_layer(plain: nn.Sequential, pipe: Pipe) -> None:
    seen: list[Any] = []

    def layer(x: Tensor) -> Tensor:
        y, z = x.sin(), x.cos()
        register_multi_grad_hook((y, z), seen.append)
        return y * z

    plain[4] = Call(layer)
    pipeline = pipe(plain)
    step(plain, rows(7))
    (expected,) = seen
    seen.clear()

    step(pipeline, rows(7))

    last_first = [torch.cat(gradients[::-1]) for gradients in zip(*seen, strict=True)]
    assert_same(last_first, list(expected))


class Keep(nn.Module):
    """Keeps a tensor of each forward, and its gradient with it; of one row, only the last."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.kept: dict[float, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        tensors = {"input": x, "between": x * 3}
        tensors["output"] = tensors["between"].sin()
        chosen = tensors[self.what]
        chosen.retain_grad()
        self.kept[x[0, 0].item()] = chosen
        return tensors["output"]

    def gradient(self) -> Tensor:
        found = [tensor.grad for tensor in self.kept.values()]
        self.kept.clear()
        return torch.cat([gradient for gradient in found if gradient is not None])


@pytest.mark.parametrize("k", range(LAYERS))
@pytest.mark.parametrize("what", ["input", "between", "output"])
def test_gradient_that_a_layer_keeps(plain: nn.Sequential, pipe: Pipe, what: str, k: int) -> None:
    """Once a stage took its input's gradient away from the layer that had kept that input."""
    plain[k] = Keep(what)
    pipeline = pipe(plain)

    for seed in range(2):
        for module in (plain, pipeline):
            step(module, rows(7, seed=seed))
        keep, other = pipeline[k], plain[k]
        assert isinstance(keep, Keep)
        assert isinstance(other, Keep)
        assert_same(keep.gradient(), other.gradient())


def test_gradients_that_are_kept_around_the_pipeline(plain: nn.Sequential, pipe: Pipe) -> None:
    kept = []
    for module in (plain, pipe(plain)):
        x = rows(7) * 2
        y = module(x)
        for tensor in (x, y):
            tensor.retain_grad()
        y.exp().sum().backward()
        kept.append((x.grad, y.grad))

    assert_same(kept[1], kept[0])


class HooksItsWeight(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.register_hook(lambda gradient: gradient * 2)
        return super().forward(x)


@pytest.mark.parametrize("k", [0, 4])
def test_hook_that_a_layer_registers_on_its_parameter(
    plain: nn.Sequential, pipe: Pipe, k: int
) -> None:
    """Once each micro-batch added a hook to the parameter, and each acted on the sum of some."""
    plain[k] = HooksItsWeight(3, 3).double()
    pipeline = pipe(plain)

    with pytest.raises(RuntimeError, match="hook"):
        step(pipeline, rows(7))


def test_hook_that_a_layer_registers_on_what_it_makes_of_its_parameter(
    plain: nn.Sequential, pipe: Pipe
) -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            weight = self.weight * 3
            weight.register_hook(lambda gradient: gradient * 2)
            return nn.functional.linear(x, weight, self.bias)

    plain[4] = Scaled(3, 3).double()

    assert_same_twice(pipe(plain), plain)


def masked(layer: nn.Module) -> None:
    prune.random_unstructured(layer, "weight", amount=0.5)


def normalised(layer: nn.Module) -> None:
    nn.utils.weight_norm(layer)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
@pytest.mark.parametrize("compute", [masked, normalised], ids=lambda f: f.__name__)
def test_hook_that_computes_a_weight(pipe: Pipe, compute: Callable[[nn.Module], None]) -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(3)
        module = perceptron(LAYERS)
        for k in (0, 4):
            compute(module[k])
        return module

    assert_same_twice(pipe(build(), copy=False), build())
