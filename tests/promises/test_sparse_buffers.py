"""Transparency: a sparse tensor registered as a buffer is a buffer like any other."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe.core.verify import verify
from tests.support.layouts import SPARSE, in_beta
from tests.support.models import assert_same, assert_same_step, perceptron, rows
from tests.support.pipes import Pipe, every_mode, with_and_without_threads
from tests.support.process import seeded

pytestmark = [
    in_beta,
    pytest.mark.parametrize("convert", SPARSE.values(), ids=SPARSE),
]

W = 4

Convert = Callable[[Tensor], Tensor]


class Graph(nn.Module):
    """Multiplies by an adjacency matrix, which it may edit or replace, and drops out."""

    def __init__(self, adjacency: Tensor, change: str) -> None:
        super().__init__()
        self.adjacency: Tensor = nn.Buffer(adjacency)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        y = x + (self.adjacency.to_dense() @ x.t()).t()
        if self.change == "edited":
            self.adjacency.mul_(0.5)
        elif self.change == "replaced":
            self.adjacency = self.adjacency * 0.5
        return y.sin()


def layers(convert: Convert, change: str) -> nn.Sequential:
    """The same layers at every call: PyTorch cannot copy modules with buffers in some layouts."""
    with seeded():
        ends = perceptron(2, W), perceptron(2, W)
    return nn.Sequential(*ends[0], Graph(convert(torch.eye(W).double()), change), *ends[1])


def adjacency(module: nn.Module) -> Tensor:
    return next(module.buffers())


@every_mode
@with_and_without_threads
def test_step(convert: Convert, pipe: Pipe) -> None:
    """Once the snapshot before a recomputation asked for the bytes of a sparse tensor."""
    plain = layers(convert, "none")
    pipeline = pipe(layers(convert, "none"), copy=False)

    for seed in range(2):
        assert_same_step(pipeline, plain, rows(7, W, seed=seed))


@every_mode
@pytest.mark.parametrize("change", ["edited", "replaced"])
def test_step_of_a_layer_that_changes_it(convert: Convert, change: str, pipe: Pipe) -> None:
    plain = layers(convert, change)
    pipeline = pipe(
        layers(convert, change), chunks=1, copy=False
    )  # the plain layer changes it once for each batch

    for seed in range(2):
        assert_same_step(pipeline, plain, rows(7, W, seed=seed))

    assert adjacency(pipeline).layout is adjacency(plain).layout
    assert_same(adjacency(pipeline).to_dense(), adjacency(plain).to_dense())


class Awakes(nn.Module):
    """Draws random numbers from its second call on, so that a forward is run again."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + 0 * torch.rand(()) if self.calls > 3 else x


def test_forward_that_is_run_again(convert: Convert, pipe: Pipe) -> None:
    module = nn.Sequential(*layers(convert, "edited"), Awakes())
    pipeline = pipe(module, copy=False)

    for _ in range(2):
        pipeline(rows(7, W)).sum().backward()

    assert_same(adjacency(pipeline).to_dense(), torch.eye(W).double() * 0.5**6)


def test_verification(convert: Convert, pipe: Pipe) -> None:
    pipeline = pipe(layers(convert, "edited"), copy=False, mode="never")

    verify(pipeline, rows(7, W))

    assert_same(adjacency(pipeline).to_dense(), torch.eye(W).double())
