"""Dense tensors as bytes, and any Python value with its tensors beside it.

To pickle tensors would copy them three times. A pickler lets values be left out by number, so
whatever object a batch is, the bytes of its tensors travel as they are, those of the same memory
once.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_gpipe.core.data import identity


class DenseForm(NamedTuple):
    """A dense tensor without its values."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    stored: tuple[int, ...]  # the size without the repetitions of an expanded tensor
    requires_grad: bool
    on_device: bool  # other than the host
    marks: tuple[str, ...]  # their names


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


def send_value(value: Any, send: Callable[[Tensor], object]) -> None:
    """Send a value without its dense tensors, and then the bytes of each that has any."""
    body = io.BytesIO()
    packer = _Packer(body)
    packer.dump(value)
    pairs = [form_and_bytes(tensor) for tensor in packer.tensors]
    text = pickle.dumps(([form for form, _ in pairs], body.getvalue()))
    send(torch.tensor(len(text)))
    send(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    for _, content in pairs:
        if content.numel():
            send(content)


def receive_value(receive: Callable[[Tensor], object]) -> Any:
    """Return a value that was sent, with its tensors on the CPU."""
    size = torch.tensor(0)
    receive(size)
    text = torch.empty(int(size), dtype=torch.uint8)
    receive(text)
    forms, body = pickle.loads(text.numpy().tobytes())
    tensors = [tensor_of(form, receive).requires_grad_(form.requires_grad) for form in forms]
    return _Unpacker(io.BytesIO(body), tensors).load()


class _Packer(pickle.Pickler):
    """Leaves out dense tensors.

    Attributes:
        tensors: The tensors that were left out.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self._numbers: dict[Hashable, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        if not is_dense(value) or value.is_meta:
            return None
        key = identity(value)
        if key not in self._numbers:
            self._numbers[key] = len(self._numbers)
            self.tensors.append(value)
        return self._numbers[key]


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, number: Any) -> Tensor:
        return self._tensors[number]
