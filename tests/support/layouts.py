"""The layouts that a tensor can have."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": torch.clone,
    "coo": lambda x: x.to_sparse(),
    "csr": lambda x: x.to_sparse_csr(),
    "csc": lambda x: x.to_sparse_csc(),
    "bsr": lambda x: x.to_sparse_bsr((2, 2)),
    "bsc": lambda x: x.to_sparse_bsc((2, 2)),
}
SPARSE = {name: convert for name, convert in LAYOUTS.items() if name != "dense"}

# PyTorch says of all layouts with compressed rows or columns that they are in beta.
in_beta = pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state")
