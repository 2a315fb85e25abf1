"""Promise: what is around a pipeline is with the last stage or the first, and counts there."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import GPipe
from tests.support.models import assert_same

WIDTH = 4


class Model(nn.Module):
    """Blocks between an embedding and a head that share a weight as heavy as two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.head = nn.Linear(WIDTH, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def model() -> Model:
    torch.manual_seed(0)
    return Model().double()


@pytest.mark.parametrize("around, balance", [("last", [4, 2]), ("first", [2, 4])])
def test_parameters_count_what_is_around(around: Any, balance: list[int]) -> None:
    made = GPipe(model(), "parameters", module="blocks", devices=["cpu"] * 2, around=around)

    assert made.balance == balance


def test_parameters_count_the_modules_before() -> None:
    both = nn.ModuleDict({"one": layers(4, 1), "two": layers(1, 1, 1, 1)})

    made = GPipe(both, "parameters", module=["one", "two"], devices=["cpu"] * 2)

    assert made.balance == [[1, 1], [1, 3]]


def layers(*sizes: int) -> nn.Sequential:
    """Layers with these numbers of parameters."""
    return nn.Sequential(*(nn.Linear(1, size, bias=False) for size in sizes))


@pytest.mark.parametrize("around", ["last", "first"])
def test_model_computes_the_same(around: Any) -> None:
    plain, own = model(), model()
    made = GPipe(own, [2, 4], module="blocks", chunks=3, around=around)
    ids = torch.arange(7)

    assert_same(made(ids), plain(ids))
    made(ids).sum().backward()
    plain(ids).sum().backward()
    for one, other in zip(own.parameters(), plain.parameters(), strict=True):
        assert_same(one.grad, other.grad)
    made.close()


def test_copy_keeps_it() -> None:
    made = GPipe(model(), [3, 3], module="blocks", around="first")

    copied = deepcopy(made)

    assert copied.layout.around == "first"
    assert "around='first'" in repr(made)
    assert "around" not in repr(GPipe(model(), [3, 3], module="blocks"))


def test_another_word() -> None:
    with pytest.raises(ValueError, match="around must be 'last' or 'first'.*got 'both'"):
        GPipe(model(), [3, 3], module="blocks", around="both")  # type: ignore[arg-type]  # wrong
