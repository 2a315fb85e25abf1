from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_gpipe.core.data.tensors import (
    bytes_of,
    copy_values,
    equal,
    identity,
    memory,
)
from tests.support.layouts import LAYOUTS, in_beta
from tests.support.ranks import Pool

pytestmark = in_beta
every_layout = pytest.mark.parametrize("convert", LAYOUTS.values(), ids=LAYOUTS)


def nested(x: Tensor) -> Tensor:
    return torch.nested.nested_tensor([x, x[:1]])


@every_layout
def test_equality(convert: Callable[[Tensor], Tensor]) -> None:
    x = torch.eye(4)

    assert equal(convert(x), convert(x))
    assert not equal(convert(x), convert(2 * x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_tensors_without_a_number_are_equal(dtype: torch.dtype) -> None:
    x = torch.full((), torch.nan, dtype=dtype).expand(3, 2)

    assert equal(x, x.clone())
    assert not equal(x, torch.zeros(3, 2, dtype=dtype))


def equality_of_shards() -> list[bool]:
    mesh = init_device_mesh("cpu", (2,))
    x = torch.arange(15.0).view(3, 5)
    found = []
    for dim in range(2):  # of lengths that two does not divide
        one = distribute_tensor(x, mesh, [Shard(dim)])
        nan = distribute_tensor(torch.full_like(x, torch.nan), mesh, [Shard(dim)])
        found += [equal(one, one.clone()), equal(nan, nan.clone()), equal(one, 2 * one)]
    return found


def test_equality_of_unevenly_divided_tensors(two_ranks: Pool) -> None:
    assert two_ranks.run(equality_of_shards) == [[True, True, False] * 2] * 2


def test_sparse_tensors_with_other_indices_differ() -> None:
    x = torch.eye(4)

    assert not equal(x.to_sparse(), x.flip(0).to_sparse())
    assert not equal(x.to_sparse(), torch.ones(4, 4).to_sparse())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_nested_tensors() -> None:
    x = nested(torch.ones(2, 3))

    assert equal(x, nested(torch.ones(2, 3)))
    assert not equal(x, nested(torch.zeros(2, 3)))
    assert bytes_of(x) == 9 * 4


@every_layout
def test_copied_values(convert: Callable[[Tensor], Tensor]) -> None:
    target, source = convert(torch.eye(4)), convert(3 * torch.eye(4))

    copy_values(target, source)

    assert equal(target, source)


def test_copy_into_a_dense_tensor_is_not_an_edit() -> None:
    target = torch.zeros(3)

    copy_values(target, torch.ones(3))

    assert target.tolist() == [1, 1, 1]
    assert target._version == 0


def test_bytes_of_indices_and_values() -> None:
    x = torch.eye(4)

    assert bytes_of(x) == 16 * 4
    assert bytes_of(x.to_sparse()) == 4 * 4 + 2 * 4 * 8
    assert bytes_of(x.to_sparse_csr()) == 4 * 4 + 4 * 8 + 5 * 8


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
