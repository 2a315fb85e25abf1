"""Blocks of a model's loop: of those that are alike one is measured for all, and no others.

Here are also the tests of ``module_kinds``.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import profile
from tests.support.clocks import Clock

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


def runs(
    change: Callable[[Block], None] | None = None, blocks: int = 9, device: str = "meta"
) -> tuple[int, list[float]]:
    """How often blocks ran, of which one in the middle was changed; and what each costs."""
    calls = []

    def ran() -> None:
        calls.append(1)

    with torch.device(device):
        model = Model([Block(ran) for _ in range(blocks)])
    if change is not None:
        change(model.blocks[blocks // 2])  # type: ignore[arg-type]  # it has blocks
    x = torch.zeros(ROWS, 4, device=device)
    found = profile(model, x, module="blocks", device=device, chunks=2)
    return len(calls), [layer.forward.at(6) for layer in found.layers]


def test_number_of_runs_does_not_depend_on_the_number_of_blocks() -> None:
    """The model's own forward runs all of them once, to find out what enters."""
    few, costs = runs(blocks=9)
    many, _ = runs(blocks=29)

    assert many - few <= 20
    assert len(set(costs)) == 1


def wider(block: Block) -> None:
    with block.up.weight.device:
        block.up, block.down = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)


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


CHANGES = [
    wider,
    of_another_kind,
    with_a_hook,
    frozen,
    with_another_number,
    with_an_index,
    with_another_list,
    with_another_function,
]


@pytest.mark.parametrize("change", CHANGES)
def test_block_that_differs_runs_itself(change: Callable[[Block], None]) -> None:
    equal, _ = runs()
    found, costs = runs(change)

    assert found > equal
    assert len(set(costs[:4] + costs[5:])) == 1
    assert (costs[4] != costs[3]) == (change in (wider, of_another_kind))


COUNTED, TIMED = 2, 3 + 2  # runs of a block: with each size; in a round, with fewer and more rows


@pytest.mark.parametrize("change", CHANGES)
def test_times_of_blocks_that_are_alike(
    change: Callable[[Block], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block that differs only in its own number is counted with fewest rows, and not timed."""
    Clock().replace(monkeypatch)
    few, _ = runs(device="cpu")
    many, _ = runs(blocks=29, device="cpu")
    changed, _ = runs(change, device="cpu")

    assert many == few
    if change is with_an_index:
        assert changed - few == COUNTED
    else:
        assert changed - few >= 2 * COUNTED + 2 * TIMED


def test_blocks_whose_numbers_tell_what_they_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are counted one by one with the fewest rows only, and differ with more rows, too."""

    class Numbered(nn.Module):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.linear, self.index = nn.Linear(WIDTH, WIDTH), index

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x)
            return x.exp() * 2 if self.index % 2 else x * 2

    Clock().replace(monkeypatch)
    model = nn.Sequential(*map(Numbered, range(6)))

    found = profile(model, torch.randn(ROWS, WIDTH))

    per_row = [layer.saved.at(ROWS) / ROWS for layer in found.layers]
    assert per_row == [4 * WIDTH, 8 * WIDTH] * 3


def test_each_of_the_blocks_that_are_alike_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that ran in each round would find its parameters in the cache."""
    ran: list[nn.Linear] = []

    class Runs(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            ran.append(self)
            return super().forward(x)

    Clock().replace(monkeypatch)
    layers = nn.Sequential(*(Runs(WIDTH, WIDTH) for _ in range(3)))

    profile(layers, torch.randn(ROWS, WIDTH))

    first, second = ran[-4 * TIMED : -2 * TIMED], ran[-2 * TIMED :]
    assert first == [layers[0]] * TIMED + [layers[1]] * TIMED
    # The first is alone: its input is no output.
    assert second == [layers[0]] * TIMED + [layers[2]] * TIMED
