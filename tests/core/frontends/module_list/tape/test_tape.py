"""A forward that does what an earlier one did has its program; one that differs has its own.

Its arguments are the same as the recorded ones in every leaf and container, or they differ.

Here are also the tests of ``arguments``, ``calls``, ``outside_tensors`` and ``placeholder``.
"""

from __future__ import annotations

import copy
from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import whole
from lightning_gpipe.core.frontends.module_list.tape.calls import TensorLeaf
from lightning_gpipe.core.frontends.module_list.tape.placeholder import Placeholder
from lightning_gpipe.core.frontends.module_list.tape.tape import OutsideTensor, same_arguments
from lightning_gpipe.core.programs import Program, Value
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


# The comparison with recorded arguments.

Pair = namedtuple("Pair", "one other")

EXPECTED = OutsideTensor(4, 4, 1, None, torch.float32, 2)


class Outsides:
    """Accepts one tensor, and takes those of two dims."""

    def __init__(self) -> None:
        self.accepted: dict[Any, Tensor] = {}
        self.asked = 0

    def is_as(self, tensor: Tensor, expected: OutsideTensor) -> bool:
        self.asked += 1
        return expected.fits(tensor)


class Recording:
    """What placeholders belong to."""

    device, grad = torch.device("cpu"), True

    def __init__(self) -> None:
        self.outsides = Outsides()


def placeholder(recording: Any, number: int) -> Placeholder:
    return Placeholder(recording, number, TensorLeaf(torch.float32, 2, 1))


@pytest.mark.parametrize("tree", [(), {}, (1, "a", None), {"k": [1.5, (True,)]}, (Pair(1, 2),)])
def test_constants_in_containers(tree: Any) -> None:
    assert same_arguments(tree, copy.deepcopy(tree), Recording())


@pytest.mark.parametrize(
    "tree, given",
    [
        ((), []),
        ((), (1,)),
        ({}, {"k": 1}),
        ({}, ()),
        ((1,), (2,)),
        ((1,), (True,)),
        ((1,), (1.0,)),
        ((1,), [1]),
        ((None,), (0,)),
        (([],), ([1],)),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, {"a": 1, "b": 1}),
        ((Pair(1, 2),), ((1, 2),)),
        ((object(),), (object(),)),
        ((Value(3),), (3,)),
        ((EXPECTED,), (None,)),
    ],
)
def test_what_differs(tree: Any, given: Any) -> None:
    assert not same_arguments(tree, given, Recording())


def test_placeholder_of_the_number_and_of_the_same_recording() -> None:
    mine, other = Recording(), Recording()
    expected = (Value(3),)

    assert same_arguments(expected, (placeholder(mine, 3),), mine)
    assert not same_arguments(expected, (placeholder(mine, 2),), mine)
    assert not same_arguments(expected, (placeholder(other, 3),), mine)
    assert not same_arguments(expected, (torch.zeros(2, 2),), mine)
    assert not same_arguments((EXPECTED,), (placeholder(mine, 4),), mine)
    assert not same_arguments((7,), (placeholder(mine, 4),), mine)


def test_tensor_from_outside_is_asked_about_until_it_is_accepted() -> None:
    recording = Recording()
    expected, given = {"mask": EXPECTED}, {"mask": torch.zeros(2, 2)}
    assert same_arguments(expected, given, recording)
    assert recording.outsides.asked == 1

    recording.outsides.accepted[EXPECTED.key] = given["mask"]
    assert same_arguments(expected, given, recording)
    assert recording.outsides.asked == 1

    assert same_arguments(expected, {"mask": torch.zeros(2, 2)}, recording)
    assert same_arguments(expected, {"mask": nn.Parameter(torch.zeros(2, 2))}, recording)
    assert not same_arguments(expected, {"mask": torch.zeros(2)}, recording)
    assert not same_arguments(expected, {"mask": torch.zeros(2, 2, dtype=torch.float64)}, recording)
    assert recording.outsides.asked == 5
