import pytest
import torch
from torch import Tensor

from lightning_gpipe.core.data.aliasing import identity, memory

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


def test_views_have_the_memory_of_what_they_are_of() -> None:
    assert memory(X) == memory(X[1:]) == memory(X.t()) == memory(X.expand(2, 2, 3))
    assert memory(X) != memory(X.clone())


@pytest.mark.parametrize("other", [torch.empty(0), X.to_sparse(), X.to("meta"), "text"])
def test_what_has_no_memory_to_share(other: object) -> None:
    assert memory(other) is None
