"""A rehearsal tells which arguments have rows, and leaves no trace.

Here are also the tests of ``cuts``, ``probes`` and ``samples``.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask

from lightning_gpipe.core.data import whole
from lightning_gpipe.core.faithful import is_recomputing
from tests.support.interpreter import Interpreter
from tests.support.loops import LENGTH, WIDTH, Around, looped, states
from tests.support.models import assert_same_step

ROWS = 7


class Taking(nn.Linear):
    """Takes an argument beside the hidden states."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor, other: Any = None) -> Tensor:
        return self.use(super().forward(x), other)

    def use(self, x: Tensor, other: Any) -> Tensor:
        return x + other


def random_of(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def assert_same_with(kind: type[Taking], others: list[Any], rows: int = ROWS) -> Interpreter:
    """A model of such blocks is the same in a pipeline with each of these arguments."""
    plain = Around(block=kind)
    model = copy.deepcopy(plain)
    run = Interpreter()
    with looped(model, run=run):
        for other in others:
            found, wanted = (each(states(rows), other=other) for each in (model, plain))
            torch.testing.assert_close(found, wanted)
    return run


@pytest.mark.parametrize(
    "shape",
    [(ROWS, 1, WIDTH), (1, LENGTH, WIDTH), (LENGTH, WIDTH), (WIDTH,), (), (1, 1, 1)],
)
def test_argument_is_cut_or_whole_by_its_shape(shape: tuple[int, ...]):
    assert_same_with(Taking, [random_of(*shape), random_of(*shape)])


def test_rows_whose_number_is_that_of_something_else():
    # (LENGTH, WIDTH) is for all rows, although there are as many; (rows, 1, 1) is not.
    assert_same_with(Taking, [random_of(LENGTH, WIDTH), random_of(LENGTH, 1, 1)], rows=LENGTH)
    assert_same_with(Taking, [random_of(2, 1, 1), random_of(1, 2, 1, 1)[0]], rows=2)


def test_several_entries_per_row():
    class Headed(Taking):
        def use(self, x: Tensor, other: Tensor) -> Tensor:
            return (x.repeat_interleave(2, 0) + other).unflatten(0, (-1, 2)).sum(1)

    run = assert_same_with(Headed, [random_of(2 * ROWS, 1, WIDTH)] * 2)
    assert run.used == [3, 3]


def test_argument_that_is_never_used_may_be_cut():
    class Ignoring(Taking):
        def use(self, x: Tensor, other: Tensor) -> Tensor:
            return x

    assert_same_with(Ignoring, [random_of(ROWS, 3), random_of(5)])


class Scaled(Taking):
    def use(self, x: Tensor, other: list[float]) -> Tensor:
        return x * sum(other)


@pytest.mark.parametrize("other", [[0.5] * ROWS, np.full(ROWS, 0.5)], ids=["list", "array"])
def test_list_as_long_as_the_rows_is_warned_of(other: Any):
    with pytest.warns(UserWarning, match=rf"all {ROWS} values of other of blocks.0 .*write whole"):
        assert_same_with(Scaled, [other])


@pytest.mark.parametrize("other", [whole([0.5] * ROWS), [0.5] * 2, (0.5,) * ROWS], ids=str)
def test_other_lists_are_whole(other: Any):
    assert_same_with(Scaled, [other])


def test_rows_that_a_block_counts_together():
    class Folding(Taking):
        def use(self, x: Tensor, other: Tensor) -> Tensor:
            return x + other.reshape(x.size(0), -1, WIDTH).mean(1, keepdim=True)

    assert_same_with(Folding, [random_of(ROWS, 4, WIDTH), random_of(ROWS, 2, WIDTH)])


def test_entries_that_a_block_counts_by_rows_are_not_whole():
    """Zeros, whole or cut, are the same; and 14 entries are as many as there are positions."""

    class Folding(Taking):
        def use(self, x: Tensor, other: Tensor) -> Tensor:
            return x + other.unflatten(0, (len(x), -1)).sum(1)

    plain = Around(block=Folding)
    model = copy.deepcopy(plain)
    with looped(model):
        for other in (0 * random_of(2 * ROWS, 1, WIDTH), random_of(2 * ROWS, 1, WIDTH)):
            found, wanted = (each(states(ROWS, 2 * ROWS), other=other) for each in (model, plain))
            torch.testing.assert_close(found, wanted)


class Averaging(Taking):
    """Takes the mean of a table, which any number of entries has."""

    def use(self, x: Tensor, other: Tensor) -> Tensor:
        return x + other.mean(0)


class Slicing(Taking):
    """Takes the first entries of a table, one for each row."""

    def use(self, x: Tensor, other: Tensor) -> Tensor:
        return x + other[: len(x)]


def test_argument_with_which_rows_depend_on_themselves_alone_in_one_reading():
    """Both readings run, with different results, which was refused.

    So was a DeBERTa on two rows: its table of relative positions may have entries for each.
    """
    for entries in (1, 2):
        assert_same_with(Averaging, [random_of(entries * ROWS, WIDTH)])
    assert_same_with(Slicing, [random_of(ROWS, 1, WIDTH)])
    assert_same_with(Averaging, [random_of(8, WIDTH)], rows=2)


def test_argument_of_which_nothing_tells_whether_it_has_rows():
    expected = rf"got other of shape \({2 * ROWS}, 1, 8\) with 7 rows, and both readings run"
    with looped(Around(block=Slicing)) as loop, pytest.raises(ValueError, match=expected):
        loop.owner(states(ROWS), other=random_of(2 * ROWS, 1, WIDTH))


def test_mark_decides_what_a_shape_does_not():
    assert_same_with(Averaging, [whole(random_of(ROWS, WIDTH)), whole(random_of(ROWS, WIDTH))])


def test_parameter_is_whole():
    assert_same_with(Averaging, [nn.Parameter(random_of(ROWS, WIDTH))])


def test_settings_of_all_kinds_are_passed_on():
    class Configured(Taking):
        def use(self, x: Tensor, other: Any) -> Tensor:
            assert other["name"] == "a" and other["none"] is None and other["flag"] is True
            return x * other["factor"] + other["pair"][0] + other["tensors"][0]

    settings = {
        "name": "a",
        "none": None,
        "flag": True,
        "factor": 3,
        "pair": (1.5, 2),
        "tensors": [random_of(ROWS, 1, 1)],
    }
    assert_same_with(Configured, [settings, settings | {"factor": 4}])


def test_one_rehearsal_per_kind_of_block_and_none_in_later_steps():
    calls: list[int] = []

    class Counting(nn.Linear):
        def __init__(self, window: bool) -> None:
            super().__init__(WIDTH, WIDTH)
            self.window = window

        def forward(self, x: Tensor) -> Any:
            if is_recomputing():
                calls.append(x.size(0))
            y = super().forward(x)
            return y.relu() if self.window else y

    model = Around()
    for k in range(4):
        model.blocks[k] = Counting(k % 2 == 1).double()
    with looped(model):
        for rows, length in [(7, 5), (5, 5), (6, 9)]:
            model(states(rows, length))
    assert calls == [2, 2]


def rehearsals(
    use: Callable[..., Tensor],
    arguments: Mapping[str, Tensor],
    *,
    rows: int = ROWS,
    length: int = LENGTH,
) -> int:
    """How often a block is run before the pipeline of four runs."""
    tried: list[int] = []

    class Using(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, **arguments: Any) -> Tensor:
            if is_recomputing():
                tried.append(len(x))
            return use(self.linear(x), **arguments)

    with looped(Around(block=Using)) as loop:
        loop.owner(states(rows, length), **arguments)
    return len(tried)


@pytest.mark.parametrize("shape", [(1, LENGTH, WIDTH), (WIDTH,), (), (LENGTH, WIDTH)])
def test_argument_whose_shape_tells_takes_one_rehearsal(shape: tuple[int, ...]):
    assert rehearsals(lambda x, other: x + other, {"other": random_of(*shape)}) == 1


def everything(
    x: Tensor, memory: Tensor, mask: Tensor, positions: Tensor, bias: Tensor, table: Tensor
) -> Tensor:
    x = x + memory.mean(1, keepdim=True) * mask[..., None] + positions[..., None].cos()
    return x + bias.unflatten(0, (len(x), -1)).sum(1) + table


def test_argument_that_may_have_rows_takes_one_more():
    length = 2 * ROWS  # so that a table for all positions has an entry for each half of a row
    arguments = {
        "memory": random_of(ROWS, 3, WIDTH),
        "mask": torch.ones(ROWS, length, dtype=torch.bool),
        "positions": torch.arange(length).expand(ROWS, -1),
        "bias": torch.zeros(4 * ROWS, 1, WIDTH, dtype=torch.float64),
        "table": random_of(length, WIDTH),
    }
    assert rehearsals(everything, arguments, length=length) == 1 + len(arguments)


def test_argument_that_makes_no_difference_takes_two_more():
    assert rehearsals(lambda x, other: x, {"other": random_of(ROWS, 3)}) == 3


def test_table_with_an_entry_per_row_by_chance_takes_one_more():
    table = {"other": random_of(LENGTH, WIDTH)}
    assert rehearsals(lambda x, other: x + other, table, rows=LENGTH) == 2


@pytest.mark.parametrize(
    "drop",
    [
        lambda x: nn.functional.dropout(x, 0.5),
        lambda x: nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
        lambda x: x + torch.randn_like(x),
    ],
)
def test_random_numbers_are_no_difference_between_readings(drop: Callable[[Tensor], Tensor]):
    assert rehearsals(lambda x, other: drop(x), {"other": random_of(ROWS, 3)}) == 3


class Changing(nn.Module):
    """Changes everything that a block can change, and draws from every generator."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("count", torch.zeros(1))
        self.generator = torch.Generator().manual_seed(0)
        self.calls, self.seen = 0, [0]
        self.first = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.count.add_(1)
        torch.rand(1)
        random.random()
        torch.rand(1, generator=self.generator)
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


def test_rehearsal_has_no_effects():
    model = Around(block=Changing, depth=2)
    block = model.blocks[0]
    assert isinstance(block, Changing)
    state = copy.deepcopy(model.state_dict())
    drawn = torch.get_rng_state(), random.getstate(), block.generator.get_state()

    class Stopped(Exception):
        pass

    def stop(*args: Any, **kwargs: Any) -> list[Any]:
        raise Stopped

    with looped(model, run=stop), pytest.raises(Stopped):
        model(states())
    torch.testing.assert_close(model.state_dict(), state)
    assert (block.calls, block.seen) == (0, [0])
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert random.getstate() == drawn[1]
    assert torch.equal(block.generator.get_state(), drawn[2])


def test_input_that_a_block_edits_in_place_is_not_edited_by_a_rehearsal():
    class Editing(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(2))

    plain = Around(block=Editing)
    model = copy.deepcopy(plain)
    with looped(model), torch.no_grad():
        torch.testing.assert_close(model(states() * 1), plain(states() * 1))


class Failing(nn.Linear):
    """Runs on the whole mini-batch alone, or not even on that."""

    def __init__(self, rows: int = ROWS) -> None:
        super().__init__(WIDTH, WIDTH)
        self.rows = rows

    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        return super().forward(x).view(self.rows, LENGTH, WIDTH)


def test_block_that_runs_on_all_rows_alone():
    model = Around(block=Failing)
    with looped(model), pytest.raises(ValueError) as caught:
        model(states(), mask=random_of(1, LENGTH))
    said = str(caught.value)
    assert said.startswith("the rows of what a block is called with must be in dim 0")
    assert (
        "blocks.0 (" in said
        and "runs on all 7 rows, and on 2 of them it raises RuntimeError: shape" in said
    )
    assert f"Cut was x ({ROWS}, {LENGTH}, {WIDTH}); whole was mask (1, {LENGTH})." in said


def test_block_that_does_not_run_on_any_rows():
    model = Around(block=lambda: Failing(ROWS + 1))
    with looped(model), pytest.raises(RuntimeError) as caught:
        model(states())
    (note,) = caught.value.__notes__
    assert "raised when blocks.0 (" in note
    assert "was tried on 2 of the 7 rows" in note


def test_blocks_of_one_class_that_return_different_things():
    class Sometimes(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return (y, y) if self is model.blocks[2] else y

    model = Around(block=lambda: Sometimes(WIDTH, WIDTH))
    with looped(model), pytest.raises(RuntimeError, match="blocks.2 must return .* same kind"):
        model(states())


def test_blocks_of_one_class_that_differ_in_a_flag():
    class Paired(nn.Linear):
        def __init__(self, pair: bool) -> None:
            super().__init__(WIDTH, WIDTH)
            self.pair = pair

        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return (y, x) if self.pair else y

    plain = Around(lambda k, x: x[0] + x[1] if isinstance(x, tuple) else x)
    for k in range(4):
        plain.blocks[k] = Paired(k in (0, 2)).double()
    model = copy.deepcopy(plain)
    with looped(model, stages=4):
        assert_same_step(model, plain, states())


@dataclass
class Masks:
    """What a user may put tensors into."""

    mask: Tensor


class Unpacking(Taking):
    def use(self, x: Tensor, other: Any) -> Tensor:
        return x * (other["mask"] if isinstance(other, dict) else other.mask)


class Hidden:
    """An object that nothing knows how to make."""

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask


@pytest.mark.parametrize("made", [Hidden, Masks])
def test_rows_in_an_object_are_refused_by_the_name_of_the_argument(made: Any):
    model = Around(block=Unpacking)
    with looped(model), pytest.raises((TypeError, ValueError), match="other"):
        model(states(), other=made(random_of(ROWS, 1, 1)))


def test_object_with_tensors_for_all_rows():
    assert_same_with(Unpacking, [Masks(random_of(1, LENGTH, 1)), Masks(random_of(WIDTH))])


class Named(NamedTuple):
    mask: Tensor


@pytest.mark.parametrize("made", [Named, lambda mask: {"mask": mask}])
def test_rows_in_named_tuples_and_dicts_are_cut(made: Any):
    class Using(Taking):
        def use(self, x: Tensor, other: Any) -> Tensor:
            return x * (other["mask"] if isinstance(other, dict) else other.mask)

    arguments = [made(random_of(rows, LENGTH, 1)) for rows in (ROWS, ROWS, 1)]
    run = assert_same_with(Using, arguments)
    assert run.used == [3, 3, 3]
    assert run.programs[0] is run.programs[1]


@pytest.mark.parametrize("rows", [None, 1, ROWS])
def test_block_mask_is_given_whole_or_refused(rows: int | None):
    def causal(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    class Masked(Taking):
        def use(self, x: Tensor, other: Any) -> Tensor:
            return x * other.kv_num_blocks[0, 0, 0]

    mask = create_block_mask(causal, rows, None, 128, 128, device="cpu")
    if rows != ROWS:
        assert_same_with(Masked, [mask, mask])
        return
    with looped(Around(block=Masked)) as loop, pytest.raises(TypeError, match="a BlockMask. Pass"):
        loop.owner(states(), other=mask)


def test_object_that_gets_rows_later():
    model = Around(block=Unpacking)
    with looped(model):
        model(states(), other=Hidden(random_of(1, LENGTH, 1)))
        with pytest.raises(TypeError, match=r"in other of blocks.0 .*, a Hidden. Pass its tensors"):
            model(states(), other=Hidden(random_of(ROWS, LENGTH, 1)))


class UsingMean(Taking):
    def use(self, x: Tensor, other: Any) -> Tensor:
        return x + other.mask.mean(0)


@pytest.mark.parametrize("grad", [True, False])
def test_object_with_what_a_block_returned_is_refused(grad: bool):
    class Passing(Taking):
        def forward(self, x: Any, other: Any = None) -> Any:
            return Masks(super().forward(x if isinstance(x, Tensor) else x.mask, 1.0))

    model = Around(block=Passing)
    with (
        looped(model),
        torch.set_grad_enabled(grad),
        pytest.raises(TypeError, match=r"in x of blocks.1 .*, a Masks. Pass its tensors"),
    ):
        model(states())


def test_object_with_rows_without_gradients():
    model, masks = Around(block=Unpacking), Masks(random_of(ROWS, 1, 1))
    plain = copy.deepcopy(model)
    with torch.no_grad(), looped(model):
        torch.testing.assert_close(model(states(), other=masks), plain(states(), other=masks))
