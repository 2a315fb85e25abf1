"""Blocks of a model's loop: those that are alike are counted once, and no others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import profile

WIDTH, ROWS = 8, 12


class Block(nn.Module):
    """Tells a list of each run; a closure, since attributes are as before after a measurement."""

    def __init__(self, ran: Callable[[], None]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.slope = 0.0
        self.settings = {"repeats": [1], "activation": nn.functional.leaky_relu}
        self._ran = ran

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        self._ran()
        return x + self.down(nn.functional.leaky_relu(self.up(self.norm(x)), self.slope) * scale)


class Other(Block):
    """The same tensors, and another forward."""

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return super().forward(super().forward(x, scale), scale)


class Model(nn.Module):
    def __init__(self, blocks: list[Block]) -> None:
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x, scale = self.embed(x), torch.ones((), device=x.device)
        for block in self.blocks:
            x = block(x, scale)
        return x


def runs(change: Callable[[Block], None] | None = None, blocks: int = 9) -> tuple[int, list[float]]:
    """How often blocks ran, of which one in the middle was changed; and what each costs."""
    calls = []

    def ran() -> None:
        calls.append(1)

    with torch.device("meta"):
        model = Model([Block(ran) for _ in range(blocks)])
    if change is not None:
        change(model.blocks[blocks // 2])  # type: ignore[arg-type]  # it has blocks
    x = torch.zeros(ROWS, 4, device="meta")
    found = profile(model, x, module="blocks", device="meta", chunks=2)
    return len(calls), [layer.forward.at(6) for layer in found.layers]


def test_number_of_runs_does_not_depend_on_the_number_of_blocks() -> None:
    """The model's own forward runs all of them once, to find out what enters."""
    few, costs = runs(blocks=9)
    many, _ = runs(blocks=29)

    assert many - few <= 20
    assert len(set(costs)) == 1


def wider(block: Block) -> None:
    block.up, block.down = nn.Linear(WIDTH, 4, device="meta"), nn.Linear(4, WIDTH, device="meta")


def of_another_kind(block: Block) -> None:
    block.__class__ = Other


def with_a_hook(block: Block) -> None:
    block.register_forward_hook(lambda *_: None)


def frozen(block: Block) -> None:
    block.requires_grad_(False)


def with_another_number(block: Block) -> None:
    block.slope = 0.5


def with_an_index(block: Block) -> None:
    vars(block)["index"] = 4


def with_another_list(block: Block) -> None:
    block.settings = {**block.settings, "repeats": [2]}


def with_another_function(block: Block) -> None:
    block.settings = {**block.settings, "activation": nn.functional.relu}


@pytest.mark.parametrize(
    "change",
    [
        wider,
        of_another_kind,
        with_a_hook,
        frozen,
        with_another_number,
        with_an_index,
        with_another_list,
        with_another_function,
    ],
)
def test_block_that_differs_runs_itself(change: Callable[[Block], None]) -> None:
    equal, _ = runs()
    found, costs = runs(change)

    assert found > equal
    assert len(set(costs[:4] + costs[5:])) == 1
    assert (costs[4] != costs[3]) == (change in (wider, of_another_kind))
