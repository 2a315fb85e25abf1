"""Size, equality and copies of tensors in any layout.

A sparse tensor, a nested one and one of MKL-DNN have no memory of their own but are made of several
tensors, or are opaque, so much of what a dense tensor can do raises an error.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BY_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_BY_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)


def bytes_of(tensor: Tensor) -> int:
    """The bytes of a tensor in any layout, those of its indices included."""
    dense = tensor.layout is torch.strided  # the fast way, for every buffer in every micro-batch
    return tensor.nbytes if dense else sum(part.nbytes for part in _parts(tensor))


def equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of the same shape and layout have the same elements, if they have any."""
    if one.is_meta or other.is_meta:
        return True
    return all(map(torch.equal, _parts(one), _parts(other)))


def copy_values(target: Tensor, source: Tensor) -> None:
    """Copy the elements, without an increment of the version counter of a dense ``target``."""
    if target.layout is torch.strided:
        target = target.data  # that of a sparse tensor has indices and values of its own
    target.copy_(source)


def record_stream(tensor: Tensor, stream: torch.cuda.Stream) -> None:
    """Tell the allocator of CUDA memory that ``stream`` uses the tensor, which is on its device."""
    for part in _parts(tensor):
        part.record_stream(stream)


def _parts(tensor: Tensor) -> list[Tensor]:
    """The dense tensors that a tensor is made of."""
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
