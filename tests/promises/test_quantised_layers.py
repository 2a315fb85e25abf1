"""Quantised weights keep their class and their scales, and adapters on them learn as elsewhere.

Libraries that quantise replace the weight of a layer by a frozen parameter of a class of their own,
of three kinds: with what it takes to compute the weight in attributes; with attributes that the
first forward hands over to the layer; or made of several tensors. Here are small ones of each.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_gpipe import GPipe
from tests.support.models import a_loss, assert_same, gradients
from tests.support.pipes import every_mode

WIDTH = 6


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight in 8 bits, and the scale of each row."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round().to(torch.int8), scale


class Scaled(nn.Parameter):
    """Integers, with their scale in an attribute."""

    scale: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> Scaled:
        copied: Scaled = super().__deepcopy__(memo)
        copied.scale = deepcopy(self.scale, memo)
        return copied


def scaled(weight: Tensor) -> Scaled:
    integers, scale = quantised(weight)
    made = Scaled(integers, requires_grad=False)
    made.scale = scale
    return made


class WithScale(nn.Module):
    """Reads the scale of its weight in every forward."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = scaled(linear.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight * self.weight.scale).to(x.dtype).T


class State:
    scale: Any = None


class TakesScale(nn.Module):
    """Takes the scale from its weight in its first forward, as bitsandbytes does in 8 bits."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = scaled(linear.weight.detach())
        self.state = State()

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.scale is not None:
            self.state.scale, self.weight.scale = self.weight.scale, None
        scale = 1 if self.state.scale is None else self.state.scale
        return x @ (self.weight * scale).to(x.dtype).T


class Composed(Tensor):
    """A weight that is made of two tensors, as in torchao."""

    @staticmethod
    def __new__(cls, integers: Tensor, scale: Tensor) -> Composed:
        made: Composed = torch.Tensor._make_wrapper_subclass(
            cls, integers.shape, dtype=scale.dtype, device=integers.device
        )
        made.integers, made.scale = integers, scale  # type: ignore[attr-defined]  # made so
        return made

    def whole(self) -> Tensor:
        integers, scale = self.integers, self.scale  # type: ignore[attr-defined]  # made so
        return integers * scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["integers", "scale"], None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # PyTorch leaves arguments out
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.clone.default, aten._to_copy.default):
            [one] = args
            return cls(one.integers.clone(), one.scale.clone())
        plain = pytree.tree_map_only(cls, Composed.whole, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


class OfTwo(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = Composed(*quantised(linear.weight.detach()))
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


class Adapted(nn.Module):
    """A frozen layer with a trainable one of low rank beside it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.base(x).tanh() + self.up(self.down(x))


class Loop(nn.Module):
    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def sequential(layers: nn.Sequential) -> nn.Module:
    return layers


@every_mode
@pytest.mark.parametrize("kind", [WithScale, TakesScale, OfTwo])
@pytest.mark.parametrize("made", [sequential, Loop])
def test_adapters_on_quantised_layers(
    made: Callable[[nn.Sequential], nn.Module], kind: Callable[[nn.Linear], nn.Module], mode: Any
) -> None:
    torch.manual_seed(0)
    layers = [Adapted(kind(nn.Linear(WIDTH, WIDTH).double())).double() for _ in range(4)]
    plain = made(nn.Sequential(*layers))
    model = deepcopy(plain)
    weights = {name: p for name, p in model.named_parameters() if name.endswith("base.weight")}
    kinds = {name: type(weight) for name, weight in weights.items()}
    module = "layers" if made is Loop else None
    pipeline = GPipe(
        model, [1, 3], module=module, devices=["cpu"] * 2, chunks=3, activation_checkpointing=mode
    )

    for seed in range(3):
        x = torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(seed)).double()
        y = x.clone().requires_grad_()
        x.requires_grad_()
        plain.zero_grad()
        model.zero_grad()
        a_loss(pipeline(x)).backward()
        a_loss(plain(y)).backward()
        assert_same(gradients(model), gradients(plain))
        torch.testing.assert_close(x.grad, y.grad)

    found = {name: p for name, p in model.named_parameters() if name.endswith("base.weight")}
    assert all(found[name] is weight for name, weight in weights.items())
    assert {name: type(weight) for name, weight in found.items()} == kinds
    pipeline.close()
