"""Deviations between the values of two runs, and how large rounding alone may make them.

A pipeline adds up the same numbers in another order, so equal means equal up to rounding, which is
relative to the summands: the gradient of a bias before a normalisation is zero except for rounding.
So a deviation is taken relative to the largest value of the tensor, or to a tenth of the largest
value of its kind if that is larger.

Layers may amplify rounding: if the input of a ReLU is almost zero, its last bit decides whether a
gradient passes, and in a deep model the difference reaches the first digit. No tolerance separates
that from a fault. So before a difference counts as a fault, the plain layers run again with the
last bits of their outputs changed at random: a value that changes as much then is not a fault of
the pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_gpipe.core.data import change_tensors
from lightning_gpipe.core.faithful import LazyManagers, Manager
from lightning_gpipe.core.verify.named_values import Values

_TOLERANCES = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
}
_ON_CUDA = 1e-2  # in float32: convolutions round to TF32 there, matrix products may
_LOW_PRECISION = 5e-2
_SMALL = 0.1
_IN_SUMS = 8  # times the last bit is the error of a sum of many terms
_TF32 = 2.0**-11  # the error of float32 on CUDA, if it is TF32
_FAR = 5.0  # times the effect of rounding is a fault; correct models reached 2.3 times


class Deviation(NamedTuple):
    """The distance of one value of the pipelined run from that of the plain one.

    ``absolute`` is the largest difference of an element, ``relative`` the same as a share of the
    largest value, infinite if the two must be equal; ``mismatch`` says why they cannot be
    subtracted.
    """

    name: str
    absolute: float
    relative: float
    mismatch: str = ""

    @property
    def of_a_number(self) -> bool:
        """True if the plain value has no dims, and the other one has some."""
        return self.mismatch.endswith(" of shape ()")

    def __str__(self) -> str:
        if self.mismatch:
            return f"is {self.mismatch}"
        if math.isinf(self.relative):
            return f"differs by up to {self.absolute:.3g} where it must be equal"
        return f"differs by up to {self.absolute:.3g} (relative: {self.relative:.1e})"


def tolerance_of(dtypes: Iterable[torch.dtype], *, on_cuda: bool) -> float:
    """Return the largest relative deviation by rounding: that of the lowest precision in use."""
    floating = [dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex]
    lowest = max((_TOLERANCES.get(dtype, _LOW_PRECISION) for dtype in floating), default=0.0)
    return max(lowest, _ON_CUDA) if on_cuda and lowest >= _TOLERANCES[torch.float32] else lowest


def deviations(plain: Values, pipelined: Values) -> list[Deviation]:
    """Return the deviation of each value of a kind that either run has, in order."""
    names = dict.fromkeys([*plain, *pipelined])
    pairs = [(name, plain.get(name), pipelined.get(name)) for name in names]
    measured = [(name, *_measure(a, b)) for name, a, b in pairs if a is not None or b is not None]
    # Values that agree to the bit, such as a mask of -1e9 among the buffers, do not set the scale.
    largest = max((size for _, gap, size, _ in measured if gap > 0 and size), default=0.0)
    return [
        Deviation(name, gap, _relative(gap, size, largest), mismatch)
        for name, gap, size, mismatch in measured
    ]


def beyond(
    plain: Values, other: Values, tolerance: float, perturbed: Values | None = None
) -> list[Deviation]:
    """Return the deviations that are more than rounding, in order.

    One that is not much larger than in a ``perturbed`` plain run counts as rounding too.
    """
    effects = [] if perturbed is None else deviations(plain, perturbed)
    finite = [effect.relative for effect in effects if math.isfinite(effect.relative)]
    allowed = max(tolerance, _FAR * max(finite, default=0.0))
    unstable = {effect.name for effect in effects if not math.isfinite(effect.relative)}  # integers
    return [
        deviation
        for deviation in deviations(plain, other)
        if deviation.relative > allowed and deviation.name not in unstable
    ]


def same_shapes(plain: Values, pipelined: Values) -> bool:
    """Return whether two groups of values have the same names and shapes."""
    groups = [
        {name: None if value is None else value.shape for name, value in group.items()}
        for group in (plain, pipelined)
    ]
    return groups[0] == groups[1]


def _measure(plain: Tensor | None, pipelined: Tensor | None) -> tuple[float, float | None, str]:
    """Return the largest difference, the largest value (None if it must be equal), the mismatch."""
    mismatch = _mismatch(plain, pipelined)
    if mismatch:
        return math.inf, None, mismatch
    assert plain is not None and pipelined is not None
    a, b = _wide(plain), _wide(pipelined)
    if not a.numel():
        return 0.0, None, ""
    equal = (a == b) | (a.isnan() & b.isnan())
    gap = (a - b).abs().masked_fill(equal, 0).nan_to_num(nan=math.inf, posinf=math.inf)
    if not (plain.is_floating_point() or plain.is_complex()):
        return float(gap.max()), None, ""
    return float(gap.max()), float(a.abs().nan_to_num(nan=0, posinf=0).max()), ""


def _relative(gap: float, size: float | None, largest: float) -> float:
    if gap == 0:
        return 0.0
    measure = 0.0 if size is None else max(size, _SMALL * largest)
    return gap / measure if measure else math.inf


def _mismatch(plain: Tensor | None, pipelined: Tensor | None) -> str:
    if plain is None or pipelined is None:
        return f"present in the {'plain' if pipelined is None else 'pipelined'} run only"
    if plain.shape != pipelined.shape or plain.dtype != pipelined.dtype:
        return f"{_kind(pipelined)} instead of {_kind(plain)}"
    return ""


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def _wide(tensor: Tensor) -> Tensor:
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return dense.to(torch.complex128 if tensor.is_complex() else torch.float64)


def perturbing() -> Callable[[Tensor], Tensor]:
    """Return a function that changes the elements of a tensor by as much as rounding may have."""
    generator = torch.Generator("cpu").manual_seed(0)

    def perturb(x: Tensor) -> Tensor:
        if not (x.is_floating_point() or x.is_complex()):
            return x
        up = torch.randint(2, x.shape, generator=generator, dtype=torch.float64, device="cpu")
        return x * (1 + _rounding_error(x) * (2 * up - 1)).to(x)

    return perturb


def perturbed(layers: Iterable[nn.Module]) -> Manager:
    """Add rounding errors to the outputs of layers in a ``with`` block, the same every time."""

    def hook(perturb: Callable[[Tensor], Tensor], layer: nn.Module, args: Any, output: Any) -> Any:
        return change_tensors(output, perturb)

    # Each draws for itself, because layers of several stages run in any order.
    hooked = (layer.register_forward_hook(partial(hook, perturbing())) for layer in layers)
    return LazyManagers(lambda: hooked)


def _rounding_error(x: Tensor) -> float:
    eps = torch.finfo(x.dtype).eps
    if x.dtype in (torch.bfloat16, torch.float16):
        return eps  # sums are accumulated in float32
    if x.dtype == torch.float32 and x.is_cuda:
        return _TF32
    return eps * _IN_SUMS
