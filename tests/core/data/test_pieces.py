from __future__ import annotations

import re
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_gpipe import GPipe, loss_in_pieces

WORDS = 50


def head() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(8, WORDS).double()


@given(n=st.integers(1, 40), rows=st.integers(1, 50), scale=st.floats(0.1, 8))
def test_value_and_gradients_are_those_of_the_whole(n: int, rows: int, scale: float) -> None:
    one = head()
    other = deepcopy(one)
    hidden = torch.randn(n, 8, dtype=torch.float64).requires_grad_()
    again = hidden.detach().clone().requires_grad_()
    targets = torch.randint(0, WORDS, (n,))

    whole = F.cross_entropy(one(hidden), targets)
    pieces = loss_in_pieces(
        lambda h, y: F.cross_entropy(other(h), y, reduction="sum"), again, targets, rows=rows
    )
    (scale * whole).backward()
    (scale * pieces / n).backward()

    found = [pieces / n, again.grad, other.weight.grad, other.bias.grad]
    torch.testing.assert_close(
        found, [whole, hidden.grad, one.weight.grad, one.bias.grad], rtol=1e-12, atol=1e-12
    )


def saved(work: Any) -> int:
    """The most elements that autograd keeps of one tensor."""
    sizes = [0]

    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        work()
    return max(sizes)


def test_no_logits_are_kept() -> None:
    hidden, targets = torch.randn(64, 8).double().requires_grad_(), torch.zeros(64).long()
    one = head()

    def of(h: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(one(h), y, reduction="sum")

    assert saved(lambda: of(hidden, targets)) == 64 * WORDS
    assert saved(lambda: loss_in_pieces(of, hidden, targets, rows=4)) < 64 * WORDS


@pytest.mark.parametrize("schedule", [None, "1f1b"])
def test_head_around_a_pipeline(schedule: Any) -> None:
    layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()
    plain, one = deepcopy(layers), head()
    x, y = torch.randn(12, 8).double(), torch.randint(0, WORDS, (12,))
    F.cross_entropy(one(plain(x)), y).backward()
    expected = [p.grad for p in (*plain.parameters(), *one.parameters())]
    one.zero_grad()
    pipeline = GPipe(layers, [1, 2], devices=["cpu", "cpu"], chunks=4)

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        hidden, targets = pipeline(batch[0]), batch[1]
        total = loss_in_pieces(
            lambda h, y: F.cross_entropy(one(h), y, reduction="sum"), hidden, targets, rows=2
        )
        return total / len(targets)

    if schedule is None:
        step((x, y)).backward()
    else:
        loss = pipeline.by_micro_batch(step, (x, y), schedule=schedule, around=one).loss
        assert loss is not None
        loss.backward()

    found = [p.grad for p in (*layers.parameters(), *one.parameters())]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    "tensors, rows, message",
    [
        (
            [torch.zeros(3, 2), torch.zeros(4)],
            2,
            "the same number of rows: got shapes [(3, 2), (4,)]",
        ),
        ([], 2, "the same number of rows: got shapes []"),
        ([torch.zeros(())], 2, "the same number of rows: got shapes [()]"),
        ([torch.zeros(0, 2)], 2, "the same number of rows: got shapes [(0, 2)]"),
        ([torch.zeros(3, 2)], 0, "rows must be 1 or more, the rows of a piece: got 0"),
        ([torch.zeros(3, 2)], 2, "must be one number, the sum over its rows: got shape (2, 2)"),
    ],
)
def test_refused(tensors: list[Tensor], rows: int, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        loss_in_pieces(lambda x: x, *tensors, rows=rows)


def test_loss_that_is_no_tensor() -> None:
    with pytest.raises(ValueError, match="got float"):
        loss_in_pieces(lambda x: 1.0, torch.zeros(3), rows=2)  # type: ignore[arg-type,return-value]  # the error


@pytest.mark.parametrize(
    "mean",
    [F.cross_entropy, lambda x, y: (x.sum(1) - y).abs().mean(), lambda x, y: x.sum() + x.mean()],
)
def test_mean_is_refused_in_more_than_one_piece(mean: Any) -> None:
    hidden, targets = torch.randn(6, 4).requires_grad_(), torch.zeros(6, dtype=torch.long)

    with pytest.raises(ValueError, match="must be a sum over its rows: got "):
        loss_in_pieces(mean, hidden, targets, rows=4)

    assert loss_in_pieces(mean, hidden, targets, rows=6) == mean(hidden, targets)


def test_mean_that_is_weighted_with_the_rows_of_a_piece() -> None:
    hidden, targets = torch.randn(6, 4).requires_grad_(), torch.randn(6, 4)

    found = loss_in_pieces(lambda x, y: len(x) * F.mse_loss(x, y), hidden, targets, rows=4)

    torch.testing.assert_close(found, 6 * F.mse_loss(hidden, targets))


def masked_mean(x: Tensor, y: Tensor) -> Tensor:
    return (x.square().sum(1) * y).sum() / y.sum()


def mean_by_rows(x: Tensor, y: Tensor) -> Tensor:
    return x.square().sum() / len(y)


def penalised(x: Tensor, y: Tensor) -> Tensor:
    return x.square().sum() + 0.1 * PENALTY


PENALTY = torch.ones(())


@pytest.mark.parametrize("loss", [masked_mean, mean_by_rows, penalised])
def test_loss_that_does_not_add_up(loss: Any) -> None:
    """Its gradients were as many times too large as there are pieces."""
    tensors = torch.randn(6, 4), torch.ones(6)

    for _ in range(2):
        with pytest.raises(ValueError, match=r"must be a sum over its rows: got [\d.]+ for the "):
            loss_in_pieces(loss, *tensors, rows=4)
    assert loss_in_pieces(loss, *tensors, rows=6) == loss(*tensors)


def test_mean_of_rows_that_are_left_out_at_first() -> None:
    x = torch.cat([torch.zeros(2, 4), torch.randn(4, 4)])

    loss_in_pieces(mean_by_rows, x, torch.ones(6), rows=3)  # nothing is known of it
    with pytest.raises(ValueError, match="must be a sum"):
        loss_in_pieces(mean_by_rows, x.flip(0), torch.ones(6), rows=3)


def test_mean_that_draws() -> None:
    with pytest.raises(ValueError, match="must be a sum over its rows: got a mean"):
        loss_in_pieces(lambda x: F.dropout(x).mean(), torch.randn(6, 4).requires_grad_(), rows=3)


def test_loss_that_draws() -> None:
    """Is not compared, and draws what it would without a comparison."""
    x = torch.randn(6, 4)
    drawn = []
    for rows in (6, 3):
        torch.manual_seed(0)
        loss_in_pieces(lambda x: F.dropout(x).sum(), x, rows=rows)
        drawn.append(torch.rand(()))

    assert drawn[0] == drawn[1]
