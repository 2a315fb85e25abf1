"""Dense tensors as bytes, and any Python value with its tensors beside it.

To pickle tensors would copy them three times. A pickler lets values be left out by number, so the
bytes of an object's tensors travel as they are, those of the same memory once. A sparse or a jagged
tensor goes as the dense ones that it is made of; any other without dense memory of its own, such as
a quantized one, is saved by torch.save.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from lightning_gpipe.core.data import LEAF_SPEC, MARKS, has_own_dispatch, identity
from lightning_gpipe.core.transport.process_group.wire.plain_values import (
    ClassName,
    PlainPickler,
    PlainUnpickler,
)

_LEAF = "leaf"
# The layouts of tensors that are made of dense ones.
_LAYOUTS = (
    torch.sparse_coo,
    torch.sparse_csr,
    torch.sparse_csc,
    torch.sparse_bsr,
    torch.sparse_bsc,
    torch.jagged,
)


# The GPUs between which tensors go straight, from the first to the second, each by its index in its
# process. No class: to pickle one would take as long as the form that it is in.
GpuPair = tuple[int, int]


class DenseForm(NamedTuple):
    """A dense tensor without its values.

    ``stored`` is its size without the repetitions of an expanded tensor. ``gpus`` are those between
    which its values go straight; None if they go with the form.
    """

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    stored: tuple[int, ...]
    gpus: GpuPair | None = None

    @property
    def nbytes(self) -> int:
        return prod(self.stored) * self.dtype.itemsize


Receive = Callable[[DenseForm], Tensor]
# A tensor object that was left out: the number of its memory, its number among the objects of that
# memory, its requires_grad, and the names of its marks. Objects of the same memory stay apart: each
# has a gradient of its own, and the sum of these must be the same as without processes, to the bit.
_Object = tuple[int, int, bool, tuple[str, ...]]


def is_dense(value: Any) -> bool:
    """Return True if a value is a tensor with dense memory of its own, which may still be awaited.

    The output of a divided layer, or the gradient of its input, is awaited where it is first used.
    """
    kinds = Tensor, torch.nn.Parameter, AsyncCollectiveTensor
    plain = type(value) in kinds and not value.is_nested
    dense = plain and value.layout is torch.strided
    return dense and not value.is_quantized and not value.is_meta


def form_and_bytes(tensor: Tensor, gpus: GpuPair | None = None) -> tuple[DenseForm, Tensor]:
    """Return a dense tensor's form, and its bytes, on the host or straight between ``gpus``."""
    device = tensor.device
    if device.type == "cpu" or (gpus is not None and device.index != gpus[0]):
        gpus = None
    value = tensor.detach()
    if value.is_conj() or value.is_neg():
        value = value.resolve_conj().resolve_neg()
    if not value.is_contiguous():  # seldom, on a hot path
        for dim, stride in enumerate(value.stride()):
            if stride == 0 and value.shape[dim] > 1:
                value = value.narrow(dim, 0, 1)
        if not _fills_its_memory(value):
            value = value.contiguous()
    form = DenseForm(tensor.dtype, tuple(tensor.shape), value.stride(), tuple(value.shape), gpus)
    on_host = device.type == "cpu" or gpus is not None
    return form, bytes_in(value if on_host else value.cpu())


def tensor_of(
    form: DenseForm, fill: Callable[[Tensor], object], receive: Receive | None = None
) -> Tensor:
    """Make a tensor without ``requires_grad`` and marks; ``receive`` makes one that comes straight.

    ``fill`` writes the values into a tensor of bytes, if there are any.
    """
    if form.gpus is not None:
        assert receive is not None, "only links have channels"
        stored = receive(form)
    else:
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
    dims = sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1)
    expected = accumulate((n for _, n in dims), int.__mul__, initial=1)
    return all(stride == product for (stride, _), product in zip(dims, expected, strict=False))


def pack(value: Any, gpus: GpuPair | None = None) -> tuple[bytes, list[Tensor]]:
    """Return a value without its dense tensors, and the bytes of these.

    The bytes are on the host, or on the first of ``gpus`` if they go straight between these.
    Identical tensors stay one, and tensors keep sharing memory. Raises a TypeError for a value that
    may not be sent.
    """
    buffer = io.BytesIO()
    packer = _Packer(buffer)
    try:
        packer.dump(value)
        others = [None if is_dense(x) else _form_of_other(_on_host(x)) for x in packer.tensors]
    except Exception as error:
        raise TypeError(
            "values sent between processes must be tensors, plain values, dataclasses, named "
            f"tuples or mappings: {type(error).__name__}: {error}. Or make the value on the stage "
            "that needs it, or run both stages in one process."
        ) from error
    forms: list[tuple[Any, ...]] = []
    contents: list[Tensor] = []
    for tensor, other in zip(packer.tensors, others, strict=True):
        if other is None:
            form, content = form_and_bytes(tensor, gpus)
            forms.append(tuple(form))  # its class would take as long as all of it
            contents.append(content)
        else:
            forms.append(other[0])
            contents += other[1]
    body = io.BytesIO()
    PlainPickler(body, pickle.HIGHEST_PROTOCOL).dump((forms, buffer.getvalue()))
    return body.getvalue(), contents


def unpack(body: bytes, fill: Callable[[Tensor], object], receive: Receive | None = None) -> Any:
    """Return a value with its tensors on the host, or on the GPU to which they came straight."""
    forms, value = PlainUnpickler(io.BytesIO(body)).load()
    tensors = [
        tensor_of(DenseForm(*form), fill, receive)
        if len(form) == len(DenseForm._fields)
        else _other_tensor_of(form, fill)
        for form in forms
    ]
    return _Unpacker(io.BytesIO(value), tensors).load()


def send_value(value: Any, send: Callable[[Tensor], object]) -> None:
    """Send a value without its dense tensors, and then the bytes of each that has any."""
    body, contents = pack(value)
    send(torch.tensor(len(body)))
    send(torch.frombuffer(bytearray(body), dtype=torch.uint8))
    for content in contents:
        if content.numel():
            send(content)


def receive_value(receive: Callable[[Tensor], object]) -> Any:
    """Return a value that was sent, with its tensors on the CPU."""
    size = torch.tensor(0)
    receive(size)
    body = torch.empty(int(size), dtype=torch.uint8)
    receive(body)
    return unpack(body.numpy().tobytes(), receive)


def _form_of_other(tensor: Tensor) -> tuple[tuple[Any, ...], list[Tensor]]:
    """Return a tensor that is not dense without its dense parts, and the bytes of these.

    The first is its layout and its packed parts; or a file, and its class if the file does not
    depend on that.
    """
    if isinstance(tensor, DTensor):
        raise TypeError(
            "between stages go the tensors of each process, got a DTensor of shape "
            f"{tuple(tensor.shape)}: give parallelize_module use_local_output=True"
        )
    cls, file = type(tensor), io.BytesIO()
    known = cls is Tensor or tensor.layout is torch.jagged
    if known and tensor.layout in _LAYOUTS and not tensor.is_meta:
        body, contents = pack(_parts(tensor))
        return (_LAYOUTS.index(tensor.layout), body), contents
    by_name = cls is not Tensor and not has_own_dispatch(tensor)
    torch.save(tensor.as_subclass(Tensor) if by_name else tensor, file)
    return (ClassName.of(cls) if by_name else None, file.getvalue()), []


def _other_tensor_of(form: tuple[Any, ...], fill: Callable[[Tensor], object]) -> Tensor:
    """Make a tensor that is not dense; invalid indices raise."""
    name, content = form
    if not isinstance(name, int):
        loaded: Tensor = torch.load(io.BytesIO(content), weights_only=True)
        return loaded if name is None else loaded.as_subclass(name.look_up())
    layout, parts = _LAYOUTS[name], unpack(content, fill)
    if layout is torch.jagged:
        return torch.nested.nested_tensor_from_jagged(*parts)
    if layout is torch.sparse_coo:
        *parts, coalesced = parts
        return torch.sparse_coo_tensor(*parts, is_coalesced=coalesced, check_invariants=True)
    return torch.sparse_compressed_tensor(*parts, layout=layout, check_invariants=True)


def _parts(tensor: Tensor) -> tuple[Any, ...]:
    if tensor.layout is torch.jagged:
        nested: Any = tensor
        shape = nested._ragged_idx, nested._maybe_min_seqlen, nested._maybe_max_seqlen
        return nested._values, nested._offsets, nested._lengths, *shape
    _, (_, parts) = tensor.detach().__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # without attributes
    return parts


def _on_host(tensor: Tensor) -> Tensor:
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return tensor if tensor.device.type in ("cpu", "meta") else tensor.cpu()


class _Packer(PlainPickler):
    """Leaves out tensors, and names the object that must be the same one in the other process."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self._numbers: dict[Hashable, int] = {}
        self._aliases: list[dict[int, int]] = []  # for each number, by the ids of objects

    def persistent_id(self, value: Any) -> _Object | str | None:
        if not isinstance(value, Tensor):
            return _LEAF if value is LEAF_SPEC else None
        key = id(value) if value.is_meta else identity(value)
        number = self._numbers.setdefault(key, len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(value)
            self._aliases.append({})
        aliases = self._aliases[number]
        alias = aliases.setdefault(id(value), len(aliases))
        marks = tuple(mark for mark in MARKS if hasattr(value, mark))
        return number, alias, value.requires_grad, marks


class _Unpacker(PlainUnpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors
        self._objects: dict[_Object, Tensor] = {}

    def persistent_load(self, name: _Object | str) -> Any:
        if isinstance(name, str):
            return LEAF_SPEC
        if name not in self._objects:
            number, alias, requires_grad, marks = name
            tensor = self._tensors[number].detach() if alias else self._tensors[number]
            for mark in marks:
                setattr(tensor, mark, True)
            self._objects[name] = tensor.requires_grad_() if requires_grad else tensor
        return self._objects[name]
