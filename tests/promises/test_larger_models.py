"""Transparency: a pipeline is a module like any other, as a part of larger models.

It may be used several times in a graph, and a module around it may run it again.
"""

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.models import Call, a_loss, assert_same_ends, perceptron, rows
from tests.support.pipes import Pipe, every_mode, with_and_without_threads

pytestmark = every_mode

W = 3


@pytest.fixture
def plain() -> nn.Sequential:
    torch.manual_seed(3)
    return perceptron(4)


class Larger(nn.Module):
    """Layers before and after, a way around, and a scale that all of it shares."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.before = nn.Linear(W, W).double()
        self.middle = middle
        self.after = nn.Linear(W, W).double()
        self.scale = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x * self.scale)
        return self.after(self.middle(y.tanh()) * self.scale + y)


def larger(middle: nn.Module) -> Larger:
    torch.manual_seed(4)
    return Larger(middle)


def of_larger(module: Larger) -> list[Tensor]:
    a_loss(module(rows(7))).backward()
    return []


@with_and_without_threads
def test_pipeline_with_parts_before_and_after(pipe: Pipe, plain: nn.Sequential) -> None:
    assert_same_ends(of_larger, larger(pipe(plain)), larger(plain))  # type: ignore[arg-type]


@with_and_without_threads
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_of_the_larger_module(
    pipe: Pipe, plain: nn.Sequential, use_reentrant: bool
) -> None:
    def run(module: nn.Module) -> list[Tensor]:
        inputs = [rows(7), rows(5, seed=1)]
        outputs = [checkpoint(module, x, use_reentrant=use_reentrant) for x in inputs]
        (a_loss(outputs[0]) * outputs[1].sum()).backward()
        return [x.grad for x in inputs if x.grad is not None]

    assert_same_ends(run, larger(pipe(plain)), larger(plain))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_of_the_parts_around(
    pipe: Pipe, plain: nn.Sequential, use_reentrant: bool
) -> None:
    def run(module: nn.Module) -> list[Tensor]:
        before, middle = module.children()
        x = rows(7)
        y = checkpoint(before, x, use_reentrant=use_reentrant)
        z = checkpoint(torch.sin, middle(y), use_reentrant=use_reentrant)
        a_loss(z).backward()
        assert x.grad is not None
        return [x.grad]

    before = perceptron(4)
    pipeline, whole = (
        nn.ModuleList([deepcopy(before), pipe(plain)]),
        nn.ModuleList([before, plain]),
    )
    assert_same_ends(run, pipeline, whole)


class Checkpointed(nn.Module):
    """A layer that recomputes itself."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(W, W)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._run, x, use_reentrant=self.use_reentrant)

    def _run(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_layers_that_checkpoint_themselves(pipe: Pipe, use_reentrant: bool) -> None:
    torch.manual_seed(3)
    layers = [Checkpointed(use_reentrant=use_reentrant) for _ in range(4)]
    plain = nn.Sequential(*layers).double()

    def run(module: nn.Module) -> list[Tensor]:
        inputs = [rows(7), rows(5, seed=1)]
        losses = [a_loss(module(x)) for x in inputs]
        for loss in reversed(losses):
            loss.backward()
        return [x.grad for x in inputs if x.grad is not None]

    assert_same_ends(run, pipe(plain), plain)


def test_two_pipelines_one_after_the_other(pipe: Pipe, plain: nn.Sequential) -> None:
    both = nn.Sequential(plain, Call(torch.sin), deepcopy(plain))
    pipelines = nn.Sequential(pipe(plain), Call(torch.sin), pipe(plain))

    def run(module: nn.Module) -> list[Tensor]:
        losses = [a_loss(module(rows(7, seed=k))) for k in range(2)]
        for loss in reversed(losses):
            loss.backward()
        return []

    assert_same_ends(run, pipelines, both)


def test_one_pipeline_in_two_places_of_a_graph(pipe: Pipe, plain: nn.Sequential) -> None:
    def run(module: nn.Module) -> list[Tensor]:
        x = rows(7)
        one, other = module(x), module(x.sin())
        (one * module(one + other)).exp().sum().backward()
        assert x.grad is not None
        return [x.grad]

    assert_same_ends(run, pipe(plain), plain)
