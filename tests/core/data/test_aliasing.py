import pytest
import torch
from torch import Tensor

from lightning_gpipe.core.data.aliasing import identity

X = torch.arange(6.0).reshape(2, 3)


@pytest.mark.parametrize(
    "other, same",
    [
        (X, True),
        (X[:, :], True),
        (X.detach(), True),
        (X.clone(), False),
        (X[:1], False),
        (X.t(), False),
        (X.detach().requires_grad_(), False),
    ],
)
def test_identity(other: Tensor, same: bool) -> None:
    assert (identity(X) == identity(other)) == same
