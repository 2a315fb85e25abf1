"""Tensors that share memory.

A tensor that appears twice in a value must stay one tensor when it is copied: a layer may edit it
in place, and a checkpoint must not save it twice.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor


def identity(tensor: Tensor) -> Hashable:
    """Return a key that is equal for two tensors of the same elements of the same memory."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.numel() == 0:
        return id(tensor)
    elements = tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride()
    return *elements, tensor.dtype, tensor.requires_grad


def memory(value: object) -> int | None:
    """Return the address of a tensor's storage, or None if it has no storage to share."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_nested:
        return None
    # storage.data_ptr() is the same address, but takes ten times as long: it makes an object.
    address = value.data_ptr()
    return address - int(value.storage_offset()) * value.element_size() if address else None


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
