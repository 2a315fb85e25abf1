"""Batch norms that normalise by the rows of all replicas of a pipeline.

Micro-batch i is normalised with micro-batch i of all replicas, as ``nn.SyncBatchNorm`` does with
whole batches, also on the CPU. Moments go round in one exchange in forward, sums for the gradient
of the input in one in backward, in a group of each worker: all replicas have the same schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

Gather = Callable[[Tensor], list[Tensor]]  # of a tensor of the same shape in each replica


class Moments(NamedTuple):
    """The moments of the input of one norm in one call, for each of C channels."""

    number: float | Tensor  # of values in each channel; of an instance norm, of rows
    mean: Tensor  # (C,)
    variance: Tensor  # (C,), unbiased


def merge_moments(moments: Iterable[Moments], *, by_row: bool = False) -> Moments:
    """Combine the moments of several samples; ``by_row``: average them, as for an instance norm.

    Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing
    sample variances" (1979), for any number of samples at once.
    """
    parts = list(moments)
    total: float | Tensor = sum(part.number for part in parts)
    mean = torch.zeros_like(parts[0].mean)
    for number, own, _ in parts:
        mean += own * (number / total)
    spread = torch.zeros_like(mean)
    for number, own, variance in parts:
        if by_row:
            spread += variance * (number / total)
        else:
            spread += variance * (number - 1) + (own - mean) ** 2 * number
    return Moments(total, mean, spread if by_row else spread / (total - 1))


def replicated_norm(norm: _BatchNorm, x: Tensor, gather: Gather) -> tuple[Tensor, Moments]:
    """Normalise the rows of this replica; return them, and the moments of those of all."""
    norm._check_input_dim(x)
    with torch.no_grad():
        values = _wide(x.detach())
        number = x.numel() / x.size(1)
        variance, mean = torch.var_mean(values, _dims(x), correction=0)
        unbiased = variance * (number / max(number - 1, 1))
        own = torch.cat([mean, unbiased, mean.new_tensor([number])])
        parts = (part.tensor_split([len(mean), 2 * len(mean)]) for part in gather(own))
        moments = merge_moments(Moments(part[2], *part[:2]) for part in parts)
        number_of_all = moments.number
        biased = moments.variance * ((number_of_all - 1) / number_of_all)
        inverse = (biased + norm.eps).rsqrt()
    y = _Normalise.apply(x, norm.weight, norm.bias, moments.mean, inverse, number_of_all, gather)
    return y, moments


class _Normalise(torch.autograd.Function):
    """Normalises by given moments of all replicas, of which the input is a part."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        inverse: Tensor,
        number: Tensor,
        gather: Gather,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, inverse, number)
        ctx.gather = gather
        y = _normalised(x, mean, inverse)
        if weight is not None:
            y *= _along(weight, x)
        if bias is not None:
            y += _along(bias, x)
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse, number = ctx.saved_tensors
        normalised, grad = _normalised(x, mean, inverse), _wide(grad)
        of_bias = grad.sum(_dims(x))
        of_weight = (grad * normalised).sum(_dims(x))
        of_input = None
        if ctx.needs_input_grad[0]:
            sums = torch.stack(ctx.gather(torch.cat([of_bias, of_weight]))).sum(0) / number
            mean_grad, mean_product = (_along(part, x) for part in sums.chunk(2))
            factor = inverse if weight is None else inverse * weight
            of_input = (grad - mean_grad - normalised * mean_product) * _along(factor, x)
            of_input = of_input.to(x.dtype)
        if weight is None:
            return of_input, *(None,) * 6
        return of_input, of_weight.to(weight.dtype), of_bias.to(weight.dtype), *(None,) * 4


def _normalised(x: Tensor, mean: Tensor, inverse: Tensor) -> Tensor:
    return (_wide(x) - _along(mean, x)) * _along(inverse, x)


def _wide(x: Tensor) -> Tensor:
    return x.to(wide(x.dtype))


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return a precision in which many values can be added: single, or a higher one."""
    return torch.promote_types(dtype, torch.float32)


def _dims(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _along(values: Tensor, x: Tensor) -> Tensor:
    return values.view(1, -1, *(1,) * (x.dim() - 2))
