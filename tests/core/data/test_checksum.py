"""Checksums tell tensors apart that differ by the last bit of some elements, of any dtype."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_gpipe.core.data import checksum

LONG = 3 * 2**17 + 5  # several pieces

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.bool,
]


def values(dtype: torch.dtype, size: int = 1000) -> Tensor:
    drawn = torch.rand(size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return (drawn * 100).to(dtype) if dtype is not torch.bool else drawn < 0.5


def sum_of(tensor: Tensor) -> int:
    found = checksum(tensor)
    assert found.dim() == 0 and found.dtype == torch.int64
    return int(found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_dtype(dtype: torch.dtype) -> None:
    tensor = values(dtype)
    other = tensor.clone()
    assert sum_of(other) == sum_of(tensor)

    other[-1] = not other[-1].item()

    assert sum_of(other) != sum_of(tensor)


@pytest.mark.parametrize("places", [[0], [LONG - 1], [5, 2**17 + 5], [1, 2, 3, 4]], ids=str)
def test_last_bits(places: list[int]) -> None:
    """Roundings up and down are as many, so the integers have the same sum."""
    tensor = values(torch.float32, LONG)
    other = tensor.clone()
    signs = torch.tensor([1, -1, -1, 1][: len(places)], dtype=torch.int32)
    other.view(torch.int32)[places] += signs

    assert sum_of(other) != sum_of(tensor)


def test_order() -> None:
    tensor = values(torch.float64, LONG)
    rolled = tensor.roll(2**17)

    assert len({sum_of(tensor), sum_of(tensor.flip(0)), sum_of(rolled)}) == 3


def test_order_within_eight_bytes() -> None:
    tensor = values(torch.float16, 24).view(2, 3, 4)
    orders = [tensor, tensor.flip(0), tensor.roll(1, 1), tensor.roll(1, 2), tensor.flip(0, 2)]

    assert len(set(map(sum_of, orders))) == len(orders)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.float64], ids=str)
@pytest.mark.parametrize("start", range(4))
def test_part_of_other_memory(dtype: torch.dtype, start: int) -> None:
    """Which may begin between two integers."""
    part = values(dtype)[start : start + 93]

    assert sum_of(part) == sum_of(part.clone())


def test_memory_in_another_order() -> None:
    tensor = values(torch.float32).view(20, 50)

    assert sum_of(tensor.t().contiguous().t()) == sum_of(tensor)
    assert sum_of(tensor[:, 1::2]) == sum_of(tensor[:, 1::2].clone())
    assert sum_of(torch.empty(0, 3)) == 0
    assert sum_of(torch.nn.Parameter(tensor)) == sum_of(tensor)
    conjugated = values(torch.complex64).mul(1 + 1j).conj()
    assert sum_of(conjugated) == sum_of(conjugated.resolve_conj())


def test_negated_view() -> None:
    negated = values(torch.complex64).mul(1 + 1j).conj().imag[:1]  # contiguous

    assert negated.is_neg()
    assert sum_of(negated) == sum_of(negated.resolve_neg())
