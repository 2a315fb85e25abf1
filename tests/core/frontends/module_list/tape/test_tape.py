"""A forward that does what an earlier one did has its program; one that differs has its own."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpipe import whole
from lightning_gpipe.core.programs import Program
from tests.support.interpreter import Interpreter
from tests.support.loops import WIDTH, Around, looped, states
from tests.support.models import assert_same


class Two(nn.Module):
    """A block with two arguments beside the hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, one: Tensor | None = None, other: Tensor | None = None) -> Tensor:
        x = self.linear(x)
        for k, each in enumerate((one, other)):
            x = x if each is None else x + (k + 2) * each
        return x


def row_of(number: float, rows: int = 7) -> Tensor:
    return torch.full((rows, 1, 1), number, dtype=torch.float64)


def programs_of(model: nn.Module, calls: Sequence[tuple[Any, dict[str, Any]]]) -> list[Program]:
    """The programs of several calls, whose outputs are those of the plain model."""
    plain, run = copy.deepcopy(model), Interpreter()
    with looped(model, run=run):
        for x, kwargs in calls:
            assert_same(model(x, **kwargs), plain(x, **kwargs))
    return run.programs


def test_next_forward_has_the_same_program():
    one, again, longer, more = programs_of(
        Around(lambda k, x: x * 2.0 if k else x),
        [(states(), {}), (states(seed=1), {}), (states(length=3), {}), (states(rows=4), {})],
    )
    assert one is again is longer is more


def test_constant_between_blocks_is_another():
    factor = [2.0]
    plain = Around(lambda k, x: x * factor[0] if k == 2 else x)
    model, run = copy.deepcopy(plain), Interpreter()
    with looped(model, run=run):
        for factor[0] in (2.0, 2.0, 3.0, 2.0):
            assert_same(model(states()), plain(states()))

    assert [each is run.programs[0] for each in run.programs] == [True, True, False, False]


def test_operator_between_blocks_is_left_out():
    chosen = [0, 1, 2, 3]
    plain = Around(lambda k, x: x.tanh() if k in chosen else x)
    model = copy.deepcopy(plain)
    with looped(model):
        for chosen[:] in ([1, 2, 3, 3], [1, 3, 3, 3], [1, 2, 3, 3]):
            assert_same(model(states()), plain(states()))


def test_argument_is_there_or_not():
    a, b = row_of(1.0), row_of(2.0)
    given: list[dict[str, Any]] = [
        {"one": a},
        {},
        {"one": a},
        {"other": b},
        {"one": None, "other": b},
    ]
    programs = programs_of(Around(block=Two), [(states(), each) for each in given])
    assert programs[0] is programs[2]


def test_two_arguments_are_the_same_tensor_or_not():
    a, b = row_of(1.0), row_of(2.0)
    same, apart = {"one": a, "other": a}, {"one": a, "other": b}
    for order in ([same, apart, same], [apart, same, apart]):
        programs_of(Around(block=Two), [(states(), each) for each in order])


def test_argument_of_another_kind():
    wide = torch.ones(1, dtype=torch.float64)
    given = [row_of(1.0), wide, row_of(1.0).float(), whole(wide), row_of(2.0)]
    programs_of(Around(block=Two), [(states(), {"one": each}) for each in given])


def test_argument_whose_size_becomes_the_number_of_rows():
    table = torch.arange(5.0, dtype=torch.float64)[:, None].expand(5, WIDTH)
    calls = [(states(rows=rows, length=5), {"one": table}) for rows in (7, 5, 7, 5)]
    programs_of(Around(block=Two), calls)


def test_other_value_of_an_earlier_block_is_used():
    class Model(Around):
        back = 1

        def forward(self, x: Tensor, **_: Any) -> Tensor:
            seen = [x]
            for block in self.blocks:
                seen.append(block(seen[-1] + seen[-min(self.back, len(seen))]))
            return seen[-1]

    plain = Model()
    model = copy.deepcopy(plain)
    with looped(model):
        for back in (1, 2, 3, 1):
            plain.back = model.back = back
            assert_same(model(states()), plain(states()))


def test_values_that_are_kept_are_others():
    plain = Around(depth=3)
    model, kept = copy.deepcopy(plain), []
    with looped(model):
        for wanted in ([], [0, 2], [1], [], [0, 2]):
            seen: list[Tensor] = []

            def between(k: int, x: Tensor, wanted=wanted, seen=seen) -> Tensor:
                if k in wanted:
                    seen.append(x)
                return x

            plain.between = model.between = between
            expected = [plain(states()), *seen]
            seen.clear()
            kept = [model(states()), *seen]
            assert_same(kept, expected)


def test_object_that_blocks_get_is_not_kept():
    class Config:
        scale = 2.0

    class Scaled(nn.Linear):
        def forward(self, input: Tensor, config: Any = None) -> Tensor:
            return super().forward(input) * config.scale

    model = Around(block=lambda: Scaled(WIDTH, WIDTH))
    plain = copy.deepcopy(model)
    with looped(model):
        for scale in (2.0, 3.0):
            config = Config()
            config.scale = scale
            assert_same(model(states(), config=config), plain(states(), config=config))
