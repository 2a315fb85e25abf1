"""Any Python value as bytes, with its tensors beside it.

To pickle tensors would copy them three times. A pickler lets values be left out by number, so
whatever object a batch is, its tensors travel as they are, those of the same memory once.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_gpipe.core.data import identity


class Form(NamedTuple):
    """What a tensor of the same form is made with."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def empty(self) -> Tensor:
        """A tensor of this form on the CPU, without values."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)


class Parcel(NamedTuple):
    """A value that was taken apart.

    Attributes:
        text: What remains, and the forms of the tensors.
        tensors: The tensors, on the CPU.
    """

    text: bytes
    tensors: list[Tensor]


def pack(value: Any) -> Parcel:
    """Take a value apart."""
    body = io.BytesIO()
    packer = _Packer(body)
    packer.dump(value)
    tensors = list(packer.found.values())
    forms = [Form(tuple(x.shape), x.stride(), x.dtype, x.requires_grad) for x in tensors]
    return Parcel(pickle.dumps((forms, body.getvalue())), [x.detach() for x in tensors])


def emptied(text: bytes) -> Parcel:
    """A parcel with this text, whose tensors have yet to get their values."""
    forms, _ = pickle.loads(text)
    return Parcel(text, [form.empty() for form in forms])


def unpack(parcel: Parcel) -> Any:
    """Put a value together."""
    forms, body = pickle.loads(parcel.text)
    for form, tensor in zip(forms, parcel.tensors, strict=True):
        tensor.requires_grad_(form.requires_grad)
    return _Unpacker(io.BytesIO(body), parcel.tensors).load()


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a dense tensor: Gloo does not know all types."""
    return _in_order(tensor).reshape(-1).view(torch.uint8)


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.found: dict[Hashable, Tensor] = {}
        self._numbers: dict[Hashable, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        if type(value) not in (Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
            return None
        if value.is_meta or value.is_quantized or value.is_nested:
            return None
        key = identity(value)
        if key not in self._numbers:
            self._numbers[key] = len(self._numbers)
            self.found[key] = _dense(value.detach().resolve_conj().resolve_neg().cpu(), value)
        return self._numbers[key]


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Iterable[Tensor]) -> None:
        super().__init__(file)
        self._tensors = list(tensors)

    def persistent_load(self, number: Any) -> Tensor:
        return self._tensors[number]


def _dense(tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor, or a copy of one with gaps or repetitions in its memory."""
    dense = tensor if _in_order(tensor).is_contiguous() else tensor.contiguous()
    return dense.detach().requires_grad_(like.requires_grad)


def _in_order(tensor: Tensor) -> Tensor:
    """The tensor with its dimensions in the order of its memory."""
    strides, shape = tensor.stride(), tensor.shape
    return tensor.permute(sorted(range(len(shape)), key=lambda k: (-strides[k], -shape[k])))
