from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gpipe.core.run.backward.roots import (
    gradients_of,
    leaves_behind,
    now,
    revisits,
    root_of,
    run_backward,
)


class Double(torch.autograd.Function):
    """A node that is written in Python."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


def test_equal_graphs_have_leaves_in_one_order() -> None:
    """Once it was that of addresses, in which devices that share a layer called collectives."""
    orders = set()
    for _ in range(20):
        weights = [torch.ones(2, requires_grad=True) for _ in range(8)]
        outputs = [(torch.stack(weights[:4]) * Double.apply(x)).sum() for x in weights[4:]]
        number = {id(weight): k for k, weight in enumerate(weights)}
        orders.add(tuple(number[id(leaf)] for leaf in leaves_behind(map(root_of, outputs))))

    assert len(orders) == 1


@pytest.mark.parametrize("leaf", [torch.ones(2), torch.ones(2, dtype=torch.int64), 3, None, "x"])
def test_what_needs_no_gradient_has_no_root(leaf: Any) -> None:
    assert root_of(leaf) is None


@pytest.mark.parametrize(
    "function, slope",
    [(lambda x: 3 * x, 3), (Double.apply, 2), (lambda x: x, 1), (lambda x: x.unbind()[1], 1)],
    ids=["C++ node", "Python node", "leaf", "second output"],
)
def test_backward_begins_at_a_root(function: Any, slope: int) -> None:
    x = torch.ones(2, requires_grad=True)
    y = function(x)

    run_backward([root_of(y)], [torch.ones_like(y)])

    expected = torch.autograd.grad(function(x), x, torch.ones_like(y))[0]
    assert x.grad is not None
    assert torch.equal(x.grad, expected)
    assert x.grad.max() == slope


def test_roots_without_a_gradient_are_left_out() -> None:
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)

    run_backward([root_of(2 * x), root_of(2 * y), None], [torch.ones(2), None, torch.ones(2)])
    run_backward([None], [None])

    assert x.grad is not None
    assert y.grad is None


def test_leaves_behind_roots() -> None:
    x, y, z = (torch.ones(2, requires_grad=True) for _ in range(3))

    found = leaves_behind([root_of(x * y), None, root_of(Double.apply(y).unbind()[0]), root_of(z)])

    assert {id(leaf) for leaf in found} == {id(x), id(y), id(z)}


def test_gradients_that_are_not_accumulated_and_leave_the_graph() -> None:
    x, y = (torch.full((2,), k, requires_grad=True) for k in (2.0, 3.0))
    product = x * y

    for _ in range(2):
        dx, dy = gradients_of([x, y], [root_of(product), None], [torch.ones(2), None])
        torch.testing.assert_close((dx, dy), (y.detach(), x.detach()))
    assert x.grad is None
    assert gradients_of([x], [root_of(product)], [None]) == [None]


@pytest.mark.parametrize(
    "function, saves",
    [
        (lambda x: x.exp(), True),
        (lambda x: x[torch.tensor([0])], True),
        (Double.apply, True),  # a node that is written in Python may
        (lambda x: x.half(), False),
        (lambda x: x.view(1, 2), False),
    ],
)
def test_nodes_that_saved_something_earlier(function: Any, saves: bool) -> None:
    x = torch.ones(2, requires_grad=True)
    before = now()
    y = function(x)
    after = now()
    root = root_of(y + x)

    assert not revisits([root, root_of(x), None], before)
    assert revisits([None, root], after) == saves
