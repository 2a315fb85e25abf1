"""A rehearsal on several GPUs: of blocks that share a weight with those of another stage."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import GPipe

pytestmark = pytest.mark.gpu

WIDTH = 4


class Block(nn.Module):
    """Of another kind than those with another flag."""

    def __init__(self, relu: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.relu = relu

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.linear(x) * mask
        return x + (y.relu() if self.relu else y)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(k == 1) for k in range(2))
        self.blocks[1].linear.weight = self.blocks[0].linear.weight  # type: ignore[union-attr]
        self.double()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, mask)
        return x


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("mode", ["always", "except_last", "never"])
def test_block_with_the_weight_of_another_stage(mode: str) -> None:
    torch.manual_seed(0)
    plain = Model()
    model = deepcopy(plain)
    pipeline = GPipe(
        model,
        [1, 1],
        module="blocks",
        devices=["cuda:0", "cuda:1"],
        chunks=3,
        activation_checkpointing=mode,  # type: ignore[arg-type]  # one of three
    )
    x, mask = torch.randn(7, 3, WIDTH).double(), torch.rand(7, 1, 1).double()

    found, expected = pipeline(x, mask), plain(x, mask)
    found.sum().backward()
    expected.sum().backward()

    torch.testing.assert_close(found.cpu(), expected)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad.cpu(), other.grad)  # type: ignore[union-attr]
    pipeline.close()
