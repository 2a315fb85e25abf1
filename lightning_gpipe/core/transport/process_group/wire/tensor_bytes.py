"""Dense tensors as bytes, and tensors made of such bytes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor


class DenseForm(NamedTuple):
    """A dense tensor without its values.

    Attributes:
        dtype: The type of its elements.
        size, stride: Those of the tensor.
        stored: The size without the repetitions of an expanded tensor.
        requires_grad: Its ``requires_grad``.
        on_device: True if it was on a device other than the host.
        marks: The names of its marks.
    """

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    stored: tuple[int, ...]
    requires_grad: bool
    on_device: bool
    marks: tuple[str, ...]


def is_dense(value: Any) -> bool:
    """Return True if a value is a tensor with dense memory of its own."""
    plain = type(value) in (Tensor, torch.nn.Parameter) and not value.is_nested
    return plain and value.layout is torch.strided and not value.is_quantized


def form_and_bytes(tensor: Tensor, marks: tuple[str, ...] = ()) -> tuple[DenseForm, Tensor]:
    """Return the form of a dense tensor, and its values as bytes on the host."""
    size, requires_grad = tuple(tensor.shape), tensor.requires_grad
    value = tensor.detach().resolve_conj().resolve_neg()
    for dim, stride in enumerate(value.stride()):
        if stride == 0 and value.shape[dim] > 1:
            value = value.narrow(dim, 0, 1)
    if not _fills_its_memory(value):
        value = value.contiguous()
    stored, order = tuple(value.shape), value.stride()
    on_device = tensor.device.type != "cpu"
    form = DenseForm(tensor.dtype, size, order, stored, requires_grad, on_device, marks)
    return form, bytes_in(value.cpu() if on_device else value)


def tensor_of(form: DenseForm, fill: Callable[[Tensor], object]) -> Tensor:
    """Make a tensor on the host, without its ``requires_grad`` and its marks.

    ``fill`` writes the values into a tensor of bytes; it is not called if there are none.
    """
    stored = torch.empty_strided(form.stored, form.stride, dtype=form.dtype)
    if stored.numel():
        fill(bytes_in(stored))
    return stored.expand(form.size) if form.stored != form.size else stored


def bytes_in(tensor: Tensor) -> Tensor:
    """Return the memory of a dense tensor as bytes, of shape ``(nbytes,)``."""
    flat = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return flat.view(torch.uint8)


def _fills_its_memory(tensor: Tensor) -> bool:
    """Return True if the elements lie side by side, each once, in any order of the dimensions."""
    if tensor.is_contiguous():
        return True
    dims = sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1)
    expected = accumulate((n for _, n in dims), int.__mul__, initial=1)
    return all(stride == product for (stride, _), product in zip(dims, expected, strict=False))
