"""What a forward does with placeholders between two blocks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_gpipe.core.pipeline import GPipe
from tests.support.loops import LENGTH, WIDTH, Around, looped, states
from tests.support.models import assert_same, assert_same_step

ROWS = 7


def at(k: int, function: Callable[[Tensor], Any]) -> Callable[[int, Any], Any]:
    """Does this before block k."""
    return lambda j, x: function(x) if j == k else x


def added(x: Tensor) -> Tensor:
    x += 1
    return x


def written(x: Tensor) -> Tensor:
    x = x * 2
    x[:, 0] = 0.5
    return x


def halves(x: Tensor) -> Tensor:
    one, other = x.chunk(2, -1)
    return torch.cat([other, one.relu()], -1)


def by_shape(x: Tensor) -> Tensor:
    rows, length, width = x.shape
    assert (rows, length, width) == (ROWS, LENGTH, WIDTH) == tuple(x.size())
    assert len(x) == x.size(0) == ROWS
    assert x.numel() == ROWS * LENGTH * WIDTH
    return x.view(-1, length, 2, width // 2).flatten(2)


def by_rows(x: Tensor) -> Tensor:
    rows, length, width = x.shape
    x = x.view(rows, length, 2, width // 2).softmax(2).reshape(rows, -1, width)
    return torch.reshape(x, (rows, 1, -1)).sin().reshape(rows, length, width).view(x.shape)


def by_kind(x: Tensor) -> Tensor:
    assert (x.dim(), x.ndim, x.dtype, x.device.type) == (3, 3, torch.float64, "cpu")
    assert x.is_floating_point() and not x.is_complex() and not x.is_cuda
    assert x.requires_grad == torch.is_grad_enabled()
    return x.to(x.dtype).type_as(x)


def with_dropout(x: Tensor) -> Tensor:
    return F.dropout(x, 0.0) + torch.zeros_like(x) + x.new_zeros(1, 1, WIDTH)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize(
    "function",
    [added, written, halves, by_shape, by_rows, by_kind, with_dropout, lambda x: x[..., :] + 0],
)
def test_operators_run_in_the_stage_before(function: Callable[[Tensor], Any], k: int):
    plain = Around(at(k, function))
    model = copy.deepcopy(plain)
    with looped(model):
        assert_same_step(model, plain, states(ROWS))


def test_module_between_blocks():
    class Normed(Around):
        def __init__(self) -> None:
            super().__init__(lambda k, x: self.norm(x))
            self.norm = nn.LayerNorm(WIDTH).double()

        def forward(self, x: Any, **kwargs: Any) -> Any:
            for block in self.blocks:
                x = block(self.norm(x))
            return x

    plain = Normed()
    plain.between = at(9, added)
    model = copy.deepcopy(plain)
    with looped(model):
        assert_same_step(model, plain, states())


def test_states_kept_for_later_are_added_to_those_of_later_stages():
    class Residual(Around):
        def forward(self, x: Any, **kwargs: Any) -> Any:
            kept = []
            for block in self.blocks:
                x = block(x)
                kept.append(x)
                x = x + kept[0]
            return x, torch.stack(kept)

    plain = Residual()
    model = copy.deepcopy(plain)
    with looped(model, stages=4):
        found, wanted = model(states()), plain(states())
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    "function, name",
    [
        (lambda x: x * x.item(), "item"),
        (lambda x: x if x else -x, "__bool__"),
        (lambda x: x * float(x), "__float__"),
        (lambda x: x * x.tolist()[0][0][0], "tolist"),
        (lambda x: torch.as_tensor(x.detach().numpy()), "numpy"),
        (lambda x: x.register_hook(print) or x, "register_hook"),
        (lambda x: print(f"{x:.2f}"), "__format__"),
        (lambda x: x.backward(), "backward"),
    ],
)
def test_values_that_are_not_known_yet(function: Callable[[Tensor], Any], name: str):
    model = Around(at(2, function))
    expected = rf"{name}\(\) at .*test_operators.py:\d+, which needs one"
    with looped(model):
        with pytest.raises(RuntimeError, match=expected):
            model(states())
        model.between = at(2, added)
        model(states())


@pytest.mark.parametrize(
    "function",
    [lambda x: x.view(LENGTH, ROWS, WIDTH), lambda x: x.expand(ROWS, LENGTH, WIDTH)],
)
def test_number_of_rows_that_a_forward_uses_for_a_number(function: Callable[[Tensor], Any]):
    model = Around(at(2, function))
    with looped(model), pytest.raises(RuntimeError, match=r"at .*test_operators.py:\d+"):
        model(states(ROWS))


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d, partial(nn.InstanceNorm1d, track_running_stats=True)]
)
def test_running_statistics_between_blocks(norm: Callable[[int], nn.Module]):
    """torch 2.13: no version counts their edits; statistics were those of a few rows, silently."""
    module = norm(LENGTH).double()
    model = Around(at(2, module))
    with looped(model):
        with pytest.raises(RuntimeError, match="_norm.* made outside of the blocks"):
            model(states())
        module.eval()
        model(states())


def test_edit_of_a_tensor_from_outside():
    total = torch.zeros(ROWS, LENGTH, WIDTH, dtype=torch.float64)
    model = Around(at(2, lambda x: total.add_(x)))
    with looped(model), pytest.raises(RuntimeError, match="made outside of the blocks"):
        model(states(ROWS))
    assert not total.any()


def test_edit_of_what_an_earlier_stage_has():
    class Editing(Around):
        def forward(self, x: Any, **kwargs: Any) -> Any:
            first = x = self.blocks[0](x)
            for block in list(self.blocks)[1:]:
                x = block(x)
                first += 1
            return x

    model = Editing()
    with looped(model, stages=4), pytest.raises(RuntimeError, match="an earlier stage has"):
        model(states())


def test_operator_without_gradients_between_blocks():
    def detached(x: Tensor) -> Tensor:
        with torch.no_grad():
            return x * 2

    model = Around(at(2, detached))
    with looped(model), pytest.raises(RuntimeError, match="grad mode from True to False"):
        model(states())


def test_result_that_is_used_after_a_loop_that_failed():
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        raise KeyError

    model = Around(at(2, keep))
    with looped(model):
        with pytest.raises(KeyError):
            model(states())
        with pytest.raises(RuntimeError, match="has ended without all.*uses what they return"):
            kept[0].sum()


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


class ReversedInput(Reversed):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x


reverse = Reversed.apply  # as the documentation of PyTorch writes it


@pytest.mark.parametrize("function", [reverse, ReversedInput.apply, lambda x: Reversed.apply(x)])
def test_autograd_function_between_blocks_is_refused_if_there_are_gradients(function: Any):
    """It was said that the forward changes the grad mode, or needs a value."""
    plain = Around(at(2, function))
    model = copy.deepcopy(plain)
    with looped(model):
        with pytest.raises(RuntimeError, match=r"got Reversed\w*\.apply\(\) at .*\.py:\d+ between"):
            model(states())
        with torch.no_grad():
            assert_same(model(states()), plain(states()))


def test_reentrant_checkpoint_between_blocks_is_refused():
    """It is an autograd function, but should be left out."""
    model = Around(at(2, lambda x: checkpoint(torch.relu, x, use_reentrant=True)))
    with looped(model), pytest.raises(RuntimeError, match="leave it out"):
        model(states())


def test_autograd_function_in_a_block():
    class Reversing(nn.Module):
        def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
            return reverse(x)

    plain = Around(at(9, added))
    plain.blocks[2] = Reversing()
    model = copy.deepcopy(plain)
    with looped(model):
        assert_same_step(model, plain, states())


def attention(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, dropout_p=0.3)


ACROSS_ROWS: dict[str, Callable[[Tensor], Any]] = {
    "mean": lambda x: x - x.mean(0),
    "norm": lambda x: x / x.norm(dim=0, keepdim=True),
    "softmax": lambda x: x.softmax(0),
    "roll": lambda x: x + x.roll(1, 0),
    "flip": lambda x: x + x.flip(0),
    "cumsum": lambda x: x.cumsum(0),
    "first": lambda x: x + x[0],
    "last": lambda x: x + x[-1],
    "slice": lambda x: x + x[1:].sum(),
    "similarities": lambda x: torch.einsum("abc,dbc->ad", x, x).sum(1)[:, None, None] * x,
    "batch_norm": lambda x: F.batch_norm(x.mT, None, None, training=True).mT,
    "max": lambda x: x - x[:, :1, :1].max(),
    "cdist": lambda x: torch.cdist(x[:, 0], x[:, 0]).sum(1)[:, None, None] * x,
    "transposed": lambda x: x.transpose(0, 1).sort(1).values.transpose(0, 1),
    "gumbel": lambda x: F.gumbel_softmax(x, dim=0),
    "attention": lambda x: attention(x.transpose(0, 1)).transpose(0, 1),
    "first rows": lambda x: x[:4],
    "last rows": lambda x: x[-4:],
    "parts of rows": lambda x: torch.cat([x[:3] * 2, x[3:]]),
    "pieces": lambda x: torch.cat([k * y for k, y in enumerate(x.split(4))]),
    "far roll": lambda x: x.roll(6, 0),
    "roll by ten": lambda x: x.roll(10, 0),
    "largest integers": lambda x: x * (9 * x).long().abs().amax(0),
    "any": lambda x: x * (1 + (x > 9).any()),
    "count": lambda x: x + (x > 9).sum(),
    "ones": lambda x: x + torch.ones(2, x.flatten(1).size(0)) @ x.flatten(1),
}


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("name", ACROSS_ROWS)
def test_operator_across_rows_is_refused(name: str, alike: bool):
    """It ran on the rows of each micro-batch: another result, without a word.

    What draws random numbers was not tried on other rows at all.
    """
    model = Around(at(2, ACROSS_ROWS[name]))
    x = states(ROWS)[:1].expand(ROWS, -1, -1) * 0 if alike else states(ROWS)
    with looped(model), pytest.raises(RuntimeError, match=r"test_operators.py:\d+"):
        model(x)


@pytest.mark.parametrize("function", [lambda x: x[:6], lambda x: x.split(6)[0]])
def test_rows_that_all_are_taken_of_a_smaller_batch(function: Callable[[Tensor], Any]):
    """A sample of six rows was right, and the tape of its forward was followed by eight."""
    plain = Around(at(2, function))
    model = copy.deepcopy(plain)
    with looped(model):
        for _ in range(2):
            torch.testing.assert_close(model(states(6)), plain(states(6)))
        with pytest.raises(RuntimeError, match="computes across the rows"):
            model(states(8))
        torch.testing.assert_close(model(states(3)), plain(states(3)))


def test_values_that_depend_on_shapes_only():
    plain = Around(
        at(2, lambda x: x + x.new_ones(LENGTH, WIDTH).tril() + torch.zeros_like(x[:, :1]))
    )
    model = copy.deepcopy(plain)
    with looped(model):
        assert_same_step(model, plain, states(8))


class Widening(nn.Linear):
    """Is as wide as it is told."""


def test_shapes_of_blocks_of_other_sizes():
    """All blocks of a class were taken to have the sizes of the first."""

    class Widths(Around):
        def __init__(self) -> None:
            super().__init__(at(2, lambda x: x * x.shape[-1] ** -0.5 + x.size(1)))
            sizes = [(WIDTH, WIDTH), (WIDTH, 12), (12, 4), (4, 4)]
            self.blocks = nn.ModuleList(Widening(*each) for each in sizes).double()

    plain = Widths()
    model = copy.deepcopy(plain)
    with looped(model):
        assert_same_step(model, plain, states(ROWS))


def test_operator_along_a_dim_that_changes():
    dims = {1: -1, 2: 0}
    model = Around(lambda k, x: x.softmax(dims.get(k, 1)))
    with looped(model), pytest.raises(RuntimeError, match="computes across the rows"):
        model(states(ROWS).detach())


def back_and_forth(x: Tensor) -> Tensor:
    y = x.transpose(0, 1)
    assert tuple(y.shape) == (LENGTH, ROWS, WIDTH)
    return (y.softmax(0) + y.flatten(0, 1).unflatten(0, (LENGTH, -1))).transpose(0, 1)


def windows(x: Tensor) -> Tensor:
    pieces = x.flatten(1).unflatten(1, (2, -1)).flatten(0, 1).softmax(-1)
    return pieces.unflatten(0, (-1, 2)).flatten(1).unflatten(1, (LENGTH, -1)) * x.detach()[:, :1]


@pytest.mark.parametrize("function", [back_and_forth, windows])
def test_operators_on_rows_that_are_moved(function: Callable[[Tensor], Any]):
    plain = Around(at(2, function))
    model = copy.deepcopy(plain)
    with looped(model):
        assert_same_step(model, plain, states(ROWS))


@pytest.mark.parametrize("rows", [4, ROWS])
def test_rows_that_follow_others_in_a_block(rows: int):
    """Two halves in dim 0 came back in the order of the micro-batches."""
    plain = Around(at(2, lambda x: torch.cat([x, x.cos()])))
    model = copy.deepcopy(plain)
    with looped(model):
        assert_same_step(model, plain, states(rows))


def test_rows_in_another_dim_are_merged_there():
    plain = Around(at(2, lambda x: x.transpose(0, 1).contiguous()))
    model = copy.deepcopy(plain)
    with looped(model):
        assert_same_step(model, plain, states(4))


DRAWN: dict[str, Callable[[Tensor], Any]] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "noise": lambda x: x + torch.randn_like(x),
    "noise of rows": lambda x: x * torch.rand_like(x[:, :1]),
    "moved": lambda x: F.dropout(x.transpose(0, 1), 0.5).transpose(0, 1) * 2,
    "normal": lambda x: torch.normal(x, torch.ones_like(x)),
    "gumbel": lambda x: F.gumbel_softmax(x, dim=-1),
}


@pytest.mark.parametrize("name", DRAWN)
def test_values_drawn_between_blocks(name: str):
    model = GPipe(
        Around(at(2, DRAWN[name])), [2, 2], module="blocks", devices=["cpu"] * 2, chunks=3
    )
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        found.append(model(states(ROWS)))
    model.close()
    assert found[0].shape == (ROWS, LENGTH, WIDTH)
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
