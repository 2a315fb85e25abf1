"""Memory, size, equality and copies of tensors in any layout.

A tensor that appears twice in a value must stay one tensor when it is copied: a layer may edit it
in place. Sparse, nested and MKL-DNN tensors have no memory of their own.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_gpipe.core.data.dtensors import shard_of
from lightning_gpipe.core.data.marks import copy_marks

_BY_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_BY_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def identity(tensor: Tensor) -> Hashable:
    """Return a key that is equal for two tensors of the same elements of the same memory."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.numel() == 0:
        return id(tensor)
    address = tensor.data_ptr()
    if not address:  # as of a tensor that a collective has yet to compute
        return id(tensor)
    return tensor.device, address, tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


def memory(value: object) -> int | None:
    """Return the address of a tensor's storage, or None if it has no storage to share."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_nested:
        return None
    if isinstance(value, DTensor):
        value = shard_of(value)
    # storage.data_ptr() is the same address, but takes ten times as long: it makes an object.
    address = value.data_ptr()
    return address - int(value.storage_offset()) * value.element_size() if address else None


def apart(tensors: Iterable[Tensor], others: Iterable[object]) -> list[Tensor]:
    """Return tensors, with copies of those that share memory with one before, or with others."""
    addresses, result = set(map(memory, others)), []
    addresses.discard(None)
    for tensor in tensors:
        address = memory(tensor)
        result.append(tensor.clone() if address in addresses else tensor)
        if address is not None:
            addresses.add(address)
    return result


def overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have an element in common."""
    if any(x.layout is not torch.strided or x.is_nested or x.numel() == 0 for x in (one, other)):
        return False
    storage = one.untyped_storage()
    if storage.data_ptr() != other.untyped_storage().data_ptr():
        return False
    if one.element_size() != other.element_size():
        return True
    number = storage.nbytes() // one.element_size()
    used = torch.zeros(number, dtype=torch.bool, device=one.device)
    used.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(used.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def has_own_dispatch(tensor: Tensor) -> bool:
    """Return True for a tensor whose class runs operators itself, as one made of tensors does."""
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def bytes_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor in any layout, including its indices."""
    dense = tensor.layout is torch.strided  # the fast way, for every buffer in every micro-batch
    return tensor.nbytes if dense else sum(part.nbytes for part in parts(tensor))


def equal(one: Tensor, other: Tensor) -> bool:
    """Return whether tensors have one shape, layout and value; a NaN equals one of its own bits."""
    if one.layout != other.layout or not (one.is_nested or one.shape == other.shape):
        return False
    return one.is_meta or other.is_meta or all(map(_same, parts(one), parts(other)))


def _same(one: Tensor, other: Tensor) -> bool:
    if torch.equal(one, other):
        return True
    numbers = one.dtype == other.dtype and (one.is_floating_point() or one.is_complex())
    return numbers and torch.equal(bits_of(one), bits_of(other))


def bits_of(tensor: Tensor) -> Tensor:
    """Return the elements of a dense tensor as integers of their bits."""
    # In one shape: a DTensor that is divided unevenly can have no other.
    plain = tensor.detach().resolve_conj().resolve_neg()
    real = torch.view_as_real(plain) if plain.is_complex() else plain
    return real.view(_INTEGERS[real.element_size()])


def copy_values(target: Tensor, source: Tensor) -> None:
    """Copy the elements, without incrementing the version counter of a dense ``target``."""
    if target.layout is torch.strided:
        target = target.data  # a sparse tensor's .data has indices and values of its own
    target.copy_(source)


def record_stream(tensor: Tensor, stream: torch.cuda.Stream) -> None:
    """Tell CUDA's allocator that ``stream`` uses the tensor, which is on the same device."""
    for part in parts(tensor):
        # A lazy conjugate, or a negative, would be computed and written back by the current stream.
        part = part.conj() if part.is_conj() else part
        part = torch._neg_view(part) if part.is_neg() else part
        part.record_stream(stream)


def parts(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that a tensor in any layout consists of."""
    layout = tensor.layout
    if layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if layout in _BY_ROWS:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if layout in _BY_COLUMNS:
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if tensor.is_nested:
        return list(tensor.unbind())
    return [tensor] if layout is torch.strided else [tensor.to_dense()]


def outline(tensor: Tensor) -> Tensor:
    """Return a tensor of the same form and marks with one element of memory, if it is dense."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return tensor
    one = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
    return copy_marks(tensor, one.requires_grad_(tensor.requires_grad))
