"""Transparency: a layer's parameters keep their class and their attributes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.models import assert_same_steps, rows
from tests.support.pipes import Pipe, every_mode, with_and_without_threads

pytestmark = [every_mode, with_and_without_threads]

W = 3


class Scaled(nn.Parameter):
    """A parameter with a scale, by which its operators multiply."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result * vars(args[1])["scale"] if func is nn.functional.linear else result


class ByScale(nn.Module):
    """Reads an attribute of its parameter, and counts its calls there."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, W * W, dtype=torch.float64).view(W, W))
        self.attributes["scale"] = 3.0
        self.attributes["seen"] = False

    @property
    def attributes(self) -> dict[str, Any]:
        return vars(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        self.attributes["seen"] = True
        return nn.functional.linear(x, self.weight) * self.attributes["scale"]


def by_attribute() -> nn.Module:
    return ByScale()


def by_operator() -> nn.Module:
    layer = nn.Linear(W, W).double()
    layer.weight = Scaled(layer.weight.detach())
    vars(layer.weight)["scale"] = 3.0
    return layer


@pytest.mark.parametrize("make", [by_attribute, by_operator])
def test_layer_that_computes_by_its_parameters_class_or_attributes(
    pipe: Pipe, make: Callable[[], nn.Module]
) -> None:
    """Once layers ran with plain nn.Parameters: AttributeError, or another result."""
    plain, same = (nn.Sequential(make(), nn.Tanh(), make()) for _ in range(2))
    same.load_state_dict(plain.state_dict())
    pipeline = pipe(same, copy=False)  # a parameter's copy has no attributes

    assert_same_steps(pipeline, plain, [rows(7), rows(5)])


def test_what_a_layer_writes_on_its_parameter_stays(pipe: Pipe) -> None:
    first, last = ByScale(), ByScale()
    pipeline = pipe(nn.Sequential(first, last), copy=False)

    pipeline(rows(7))

    assert first.attributes["seen"]
    assert last.attributes["seen"]


class Fused(nn.Module):
    """Computes the gradient of its weight in another dtype than the weight's."""

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return x * weight.double()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            x, weight = ctx.saved_tensors
            return gradients[0] * weight.double(), (gradients[0] * x).sum(0)

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.weight: Any = nn.Parameter(torch.ones(W, dtype=torch.float16))
        self.weight.grad_dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Fused.Scale.apply(x, self.weight)
        return result


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="torch 2.10 has it")
@pytest.mark.parametrize("dtype", [torch.float64, None])
def test_dtype_of_the_gradient(pipe: Pipe, dtype: torch.dtype | None) -> None:
    """Once it was the parameter's, in which large ones are infinite."""
    plain, same = (nn.Sequential(Fused(dtype), nn.Tanh(), Fused(dtype)) for _ in range(2))
    pipeline = pipe(same, copy=False)

    assert_same_steps(pipeline, plain, [1e6 * rows(7)])
