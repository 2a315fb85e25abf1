"""Size, equality and copies of tensors in any layout.

Sparse, nested and MKL-DNN tensors have no memory of their own: they consist of several tensors, or
are opaque. So many operations on dense tensors raise an error for them.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BY_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_BY_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)


def bytes_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor in any layout, including its indices."""
    dense = tensor.layout is torch.strided  # the fast way, for every buffer in every micro-batch
    return tensor.nbytes if dense else sum(part.nbytes for part in _parts(tensor))


def equal(one: Tensor, other: Tensor) -> bool:
    """Return whether tensors of one shape and layout have equal elements; meta tensors do."""
    if one.is_meta or other.is_meta:
        return True
    return all(map(torch.equal, _parts(one), _parts(other)))


def copy_values(target: Tensor, source: Tensor) -> None:
    """Copy the elements, without incrementing the version counter of a dense ``target``."""
    if target.layout is torch.strided:
        target = target.data  # a sparse tensor's .data has indices and values of its own
    target.copy_(source)


def record_stream(tensor: Tensor, stream: torch.cuda.Stream) -> None:
    """Tell CUDA's allocator that ``stream`` uses the tensor, which is on the same device."""
    for part in _parts(tensor):
        part.record_stream(stream)


def _parts(tensor: Tensor) -> list[Tensor]:
    """The dense tensors that a tensor consists of."""
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
