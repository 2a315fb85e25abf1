"""Transparency: gradients that autograd hands out in one memory are those of the plain module.

The sum of two parameters gives both the same gradient, and of one row that of the input too.
Autograd takes such a gradient over without a copy, and adds those of the next micro-batches in
place.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import GPipe, whole
from tests.support.models import Call, a_loss, assert_same, assert_same_step, gradients, rows
from tests.support.pipes import Pipe, every_mode, with_and_without_threads

W = 3


class Position(nn.Module):
    """Adds parameters as views, as models do with embeddings of positions and segments."""

    def __init__(self) -> None:
        super().__init__()
        self.position, self.segment = nn.Parameter(torch.zeros(W)), nn.Parameter(torch.zeros(W))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.position[None] + self.segment[None]


class Rank(nn.Module):
    """Adds a sum of two parameters of other shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(W, 1)), nn.Parameter(torch.ones(1, W))

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.a.view(-1) + self.b.view(-1))


class Parts(nn.Module):
    """Adds parameters that are put together, whose gradients are parts of one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(W - 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.cat([self.first, self.rest])[None]


ADDING = [Position, Rank, Parts]


def model(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(W, W), *layers, nn.Linear(W, W), nn.Identity()).double()


@every_mode
@with_and_without_threads
@pytest.mark.parametrize("kind", ADDING)
@pytest.mark.parametrize("chunks", [1, 3, 7])
def test_parameters(pipe: Pipe, kind: Any, chunks: int) -> None:
    plain = model(kind(), kind())

    assert_same_step(pipe(plain, stages=3, chunks=chunks), plain, rows(7))


@with_and_without_threads
@pytest.mark.parametrize("kind", ADDING)
@pytest.mark.parametrize("balance", [[1, 4], [2, 3], [3, 2], [1, 1, 1, 1, 1]])
def test_split_backward(pipe: Pipe, kind: Any, balance: list[int]) -> None:
    plain = model(kind(), kind())

    assert_same_step(pipe(plain, balance, chunks=7, split_backward=True), plain, rows(7))


@every_mode
@pytest.mark.parametrize("kind", ADDING)
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("chunks", [1, 7])
def test_loss_for_each_micro_batch(pipe: Pipe, kind: Any, schedule: Any, chunks: int) -> None:
    """The gradient of the loss is another one than was expected, by which all are multiplied."""
    plain, around = model(kind(), kind()), kind().double()
    pipeline = pipe(plain, [2, 3], chunks=chunks)

    def loss(module: nn.Module, x: Tensor) -> Tensor:
        return around(module(x)).square().sum(1).mean()

    def step(x: Tensor) -> Tensor:
        return loss(pipeline, x)

    (loss(plain, rows(7)) / 2).backward()
    expected = {name: p.grad for name, p in around.named_parameters()}
    around.zero_grad()
    outcome = pipeline.by_micro_batch(step, rows(7), schedule=schedule, around=around)
    assert outcome.loss is not None
    (outcome.loss / 2).backward()
    assert_same(gradients(pipeline), gradients(plain))
    assert_same({name: p.grad for name, p in around.named_parameters()}, expected)


@pytest.mark.parametrize("chunks, count", [(1, 7), (3, 7), (7, 1), (7, 7)])
def test_captured_tensors(chunks: int, count: int) -> None:
    """They are in two stages, whose gradients are added."""
    one, other = (torch.ones(W, dtype=torch.float64, requires_grad=True) for _ in range(2))
    plain = model(*(Call(lambda x: x * (one + other)) for _ in range(2)))
    pipeline = GPipe(plain, [2, 3], devices=["cpu", "cpu"], chunks=chunks)

    found = []
    for module in (plain, pipeline):
        one.grad = other.grad = None
        a_loss(module(rows(count))).backward()
        found.append([one.grad, other.grad])
    pipeline.close()

    assert_same(found[1], found[0])


@every_mode
def test_value_that_all_micro_batches_get(pipe: Pipe) -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.ones(1, W))

        def forward(self, inputs: Any) -> Tensor:
            x, w = inputs
            return x * (w.view(-1) + self.shift.view(-1))

    found = []
    plain = nn.Sequential(Shifted(), nn.Linear(W, W)).double()
    for module in (plain, pipe(plain, [1, 1], chunks=3)):
        w = torch.ones(W, 1, dtype=torch.float64, requires_grad=True)
        module.zero_grad()
        a_loss(module((rows(7), whole(w)))).backward()
        found.append([w.grad, gradients(module)])

    assert_same(found[1], found[0])


@pytest.mark.parametrize("kind", ADDING)
def test_gradient_of_the_output_stays(pipe: Pipe, kind: Any) -> None:
    pipeline = pipe(nn.Sequential(nn.Linear(W, W), kind()).double(), [1, 1], chunks=1)
    gradient = torch.ones(1, W, dtype=torch.float64)

    for _ in range(2):
        pipeline(rows(1)).backward(gradient)

    assert gradient.equal(torch.ones_like(gradient))
