"""Measures how much rounding alone changes a value.

Layers may amplify rounding. If the input of a ReLU is almost zero, its last bit decides whether a
gradient passes, and in a deep model the difference reaches the first digit by the end of backward.
No tolerance separates that from a fault. So before a difference counts as a fault, the plain layers
run again with the last bits of their outputs changed at random: a value that changes as much then
is not a fault of the pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpipe.core.profile import change_tensors

AMPLIFIED = (
    "rounding alone changes it about as much, because the layers amplify it. To find other "
    "differences, call verify() in float64"
)

_IN_SUMS = 8  # times the last bit is the error of a sum of many terms
_TF32 = 2.0**-11  # the error of float32 on CUDA, if it is TF32


def perturbing() -> Callable[[Tensor], Tensor]:
    """Return a function that changes the elements of a tensor by as much as rounding may have."""
    generator = torch.Generator("cpu").manual_seed(0)

    def perturb(x: Tensor) -> Tensor:
        if not (x.is_floating_point() or x.is_complex()):
            return x
        up = torch.randint(2, x.shape, generator=generator, dtype=torch.float64, device="cpu")
        return x * (1 + _rounding_error(x) * (2 * up - 1)).to(x)

    return perturb


@contextmanager
def perturbed(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Add rounding errors to the outputs of layers in a ``with`` block, the same every time."""

    def hook(perturb: Callable[[Tensor], Tensor], layer: nn.Module, args: Any, output: Any) -> Any:
        return change_tensors(output, perturb)

    with ExitStack() as hooks:
        for layer in layers:
            # Each draws for itself, because layers of several stages run in any order.
            hooks.callback(layer.register_forward_hook(partial(hook, perturbing())).remove)
        yield


def _rounding_error(x: Tensor) -> float:
    eps = torch.finfo(x.dtype).eps
    if x.dtype in (torch.bfloat16, torch.float16):
        return eps  # sums are accumulated in float32
    if x.dtype == torch.float32 and x.is_cuda:
        return _TF32
    return eps * _IN_SUMS
