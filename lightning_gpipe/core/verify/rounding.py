"""How far rounding alone moves a value.

Layers may amplify rounding. Where the input of a ReLU is all but zero, its last bit decides whether
a gradient passes, and in a deep model the difference is in the first digit by the end of backward.
No tolerance tells that from a fault. So before a difference is taken for one, the plain layers run
again with the last bits of what each returns changed at random: a value that moves as far then is
not the pipeline's doing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

AMPLIFIED = (
    "rounding alone moves it about as far, because the layers amplify it. What else may differ, "
    "verify() sees in float64"
)

_IN_SUMS = 8  # times its last bit is what a sum of many terms loses
_TF32 = 2.0**-11  # what float32 may lose on CUDA


def perturbing() -> Callable[[Tensor], Tensor]:
    """A function that changes the elements of a tensor by what they may have lost in rounding."""
    generator = torch.Generator("cpu").manual_seed(0)

    def shake(x: Tensor) -> Tensor:
        if not (x.is_floating_point() or x.is_complex()):
            return x
        up = torch.randint(2, x.shape, generator=generator, dtype=torch.float64, device="cpu")
        return x * (1 + _lost(x) * (2 * up - 1)).to(x)

    return shake


def _lost(x: Tensor) -> float:
    eps = torch.finfo(x.dtype).eps
    if x.dtype in (torch.bfloat16, torch.float16):
        return eps  # added up in float32
    if x.dtype == torch.float32 and x.is_cuda:
        return _TF32
    return eps * _IN_SUMS
