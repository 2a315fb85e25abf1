from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_gpipe.core.data.tensor_layouts import bytes_of, copy_values, equal
from tests.support.layouts import LAYOUTS, in_beta

pytestmark = in_beta
every_layout = pytest.mark.parametrize("convert", LAYOUTS.values(), ids=LAYOUTS)


def nested(x: Tensor) -> Tensor:
    return torch.nested.nested_tensor([x, x[:1]])


@every_layout
def test_equality(convert: Callable[[Tensor], Tensor]) -> None:
    x = torch.eye(4)

    assert equal(convert(x), convert(x))
    assert not equal(convert(x), convert(2 * x))


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
