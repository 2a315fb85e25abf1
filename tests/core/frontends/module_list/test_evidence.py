"""How many rehearsals it takes to see which arguments of a block have rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_gpipe.core.faithful import is_recomputing
from tests.support.loops import LENGTH, WIDTH, Around, looped, states

ROWS = 7
Use = Callable[..., Tensor]

# Where no mode can be used, rows differ by what they draw.
needs_modes = pytest.mark.skipif(
    not hasattr(TorchDispatchMode, "ignore_compile_internals"), reason="needs torch 2.9"
)


def rehearsals(
    use: Use, arguments: Mapping[str, Tensor], *, rows: int = ROWS, length: int = LENGTH
) -> int:
    """How often a block is run before the pipeline of four runs."""
    tried: list[int] = []

    class Using(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, **given: Any) -> Tensor:
            if is_recomputing():
                tried.append(len(x))
            return use(self.linear(x), **given)

    model = Around(block=Using)
    with looped(model):
        model(states(rows, length), **arguments)
    return len(tried)


def random_of(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def everything(
    x: Tensor, memory: Tensor, mask: Tensor, positions: Tensor, bias: Tensor, table: Tensor
) -> Tensor:
    x = x + memory.mean(1, keepdim=True) * mask[..., None] + positions[..., None].cos()
    return x + bias.unflatten(0, (len(x), -1)).sum(1) + table


def test_arguments_of_all_types_that_may_have_rows_take_one_rehearsal():
    length = 2 * ROWS  # so that a table for all positions has an entry for each half of a row
    arguments = {
        "memory": random_of(ROWS, 3, WIDTH),
        "mask": torch.ones(ROWS, length, dtype=torch.bool),
        "positions": torch.arange(length).expand(ROWS, -1),
        "bias": torch.zeros(4 * ROWS, 1, WIDTH, dtype=torch.float64),
        "table": random_of(length, WIDTH),
    }
    assert rehearsals(everything, arguments, length=length) == 1


@needs_modes
@pytest.mark.parametrize(
    "drop",
    [
        lambda x: nn.functional.dropout(x, 0.5),
        lambda x: nn.functional.alpha_dropout(x, 0.5, training=True),
        lambda x: nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
        lambda x: x * x.new_empty(len(x), 1, 1).bernoulli_(0.5),
        lambda x: x + torch.randn_like(x),
        lambda x: torch.ops.aten.native_dropout(x, 0.5, True)[0],
    ],
)
def test_blocks_that_draw_take_one_rehearsal(drop: Callable[[Tensor], Tensor]):
    def use(x: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
        return drop(x + mask) + bias

    assert rehearsals(use, {"mask": random_of(ROWS, 1, 1), "bias": random_of(ROWS, 1, WIDTH)}) == 1


def test_numbers_that_are_all_the_same_take_one_rehearsal():
    def use(x: Tensor, mask: Tensor) -> Tensor:
        return x * mask[..., None]

    assert rehearsals(use, {"mask": torch.ones(ROWS, LENGTH, dtype=torch.long)}) == 1


@pytest.mark.parametrize(
    "use, other",
    [
        (lambda x, other: x, random_of(ROWS, 3)),
        # No index but 0 is sure to be within the table.
        (lambda x, other: x + random_of(2, WIDTH)[other], torch.zeros(ROWS, 1, dtype=torch.long)),
    ],
)
def test_argument_that_makes_no_difference_takes_one_more(use: Use, other: Tensor):
    assert rehearsals(use, {"other": other}) == 2


def test_table_with_an_entry_per_row_by_chance_takes_more():
    def use(x: Tensor, other: Tensor) -> Tensor:
        return x + other

    assert rehearsals(use, {"other": random_of(LENGTH, WIDTH)}, rows=LENGTH) == 3


def test_block_that_accepts_no_other_values_takes_one_more_for_each_argument():
    def use(x: Tensor, positions: Tensor, lengths: Tensor) -> Tensor:
        if not torch.equal(positions, positions.sort(-1).values):
            raise ValueError("positions must be in order")
        return x + positions[..., None] + lengths

    arguments = {
        "positions": torch.arange(LENGTH).expand(ROWS, -1),
        "lengths": torch.full((ROWS, 1, 1), LENGTH),
    }
    assert rehearsals(use, arguments) == 4


def test_table_of_which_a_row_takes_an_entry_is_refused():
    def use(x: Tensor, other: Tensor) -> Tensor:
        return x + other[: len(x)]

    with pytest.raises(ValueError, match=r"got other of shape \(14, 1, 8\) with 7 rows"):
        rehearsals(use, {"other": random_of(2 * ROWS, 1, WIDTH)})


def test_large_numbers_in_masks_hide_nothing():
    def use(x: Tensor, mask: Tensor, other: Tensor) -> Tensor:
        return x + mask + other

    low = torch.full((ROWS, LENGTH, 1), torch.finfo(torch.float64).min, dtype=torch.float64)
    mask = low.where(torch.arange(LENGTH)[:, None] > 2, torch.zeros_like(low))
    assert rehearsals(use, {"mask": mask, "other": random_of(ROWS, 1, 1)}) == 1


def test_rows_that_differ_by_rounding_show_nothing():
    def use(x: Tensor, other: Tensor) -> Tensor:
        noise = torch.linspace(0, 1e-12, len(x), dtype=x.dtype)[:, None, None]
        return x + other.mean() + noise

    with pytest.raises(ValueError, match="both readings run"):
        rehearsals(use, {"other": random_of(ROWS, WIDTH)})
