"""Small quantised weights, and layers that use them.

Libraries that quantise replace the weight of a layer by a frozen parameter of a class of their own,
of three kinds: with what it takes to compute the weight in attributes; with attributes that the
first forward hands over to the layer; or made of several tensors. Here are small ones of each.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight in 8 bits, and the scale of each row."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round().to(torch.int8), scale


class Scaled(nn.Parameter):
    """Integers, with their scale in an attribute."""

    scale: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> Scaled:
        copied: Scaled = super().__deepcopy__(memo)
        copied.__dict__ = deepcopy(self.__dict__, memo)
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

    def _apply(self, fn: Any, recurse: bool = True) -> WithScale:
        super()._apply(fn, recurse)
        self.weight.scale = fn(self.weight.scale)
        return self

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

    @staticmethod
    def __tensor_unflatten__(tensors: dict[str, Tensor], *_: Any) -> Composed:
        return Composed(tensors["integers"], tensors["scale"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # PyTorch leaves arguments out
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.clone.default, aten._to_copy.default):
            [one] = args
            device = (kwargs or {}).get("device") or one.device
            return cls(one.integers.to(device, copy=True), one.scale.to(device, copy=True))
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

    def __init__(self, base: nn.Module, width: int) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

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
