"""Transparency: a layer may do different things in each step and in each micro-batch.

Nothing is traced and no shape is recorded. A layer that decides by the values of its input decides
by micro-batch, so it is compared with the plain module run on each micro-batch by itself.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from lightning_gpipe.core.data.microbatch.rows import Rows
from tests.support.models import (
    Attention,
    Call,
    assert_same,
    assert_same_step,
    assert_same_steps,
    gradients,
    perceptron,
    rows,
    step,
)
from tests.support.pipes import M, Pipe, every_mode

pytestmark = every_mode

W = 3


class Mapped(nn.Module):
    """The plain module run on each micro-batch by itself."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Under the plain module's names."""
        return self.module.named_parameters(*args, **kwargs)

    def forward(self, batch: Any) -> Any:
        return Rows().merge([self.module(x) for x in Rows().split(batch, M)], batch)


# Shapes.


def tokens(count: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(5, (count, length), generator=generator)


def test_batches_and_sequences_of_every_size(pipe: Pipe) -> None:
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Embedding(5, W), Attention(W), nn.Linear(W, W)).double()
    sizes = [(7, 4), (7, 9), (2, 4), (1, 1), (12, 2), (7, 4)]

    assert_same_steps(pipe(plain, stages=len(plain)), plain, [tokens(*size) for size in sizes])


def test_images_of_every_size(pipe: Pipe) -> None:
    torch.manual_seed(3)
    plain = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1),
        nn.MaxPool2d(2),
        nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, W)),
    ).double()
    shapes = [(6, 2, 8, 8), (4, 2, 5, 7), (1, 2, 16, 2), (6, 2, 8, 8)]

    assert_same_steps(
        pipe(plain, stages=len(plain)),
        plain,
        [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes],
    )


def test_numbers_of_dimensions_that_differ(pipe: Pipe) -> None:
    plain = perceptron(4)
    shapes: list[tuple[int, ...]] = [(7, W), (7, 2, W), (4, 2, 2, W), (7, W)]

    assert_same_steps(
        pipe(plain, stages=len(plain)),
        plain,
        [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes],
    )


def test_shapes_that_differ_between_training_and_evaluation(pipe: Pipe) -> None:
    plain = perceptron(4)
    pipeline = pipe(plain, stages=len(plain))

    for count in (8, 3, 11):
        assert_same_steps(pipeline, plain, [rows(count)])
        with torch.no_grad():
            for module in (plain.eval(), pipeline.eval()):
                module(rows(2 * count))
        assert_same(pipeline(rows(count + 1)), plain(rows(count + 1)))
        plain.train()
        pipeline.train()


def test_smaller_batch_after_a_larger_one(pipe: Pipe) -> None:
    """torch 2.13: returned rows of the batch before."""
    plain = perceptron(4)
    pipeline = pipe(plain)

    with torch.no_grad():
        pipeline(rows(8))
        assert_same(pipeline(rows(4, seed=1)), plain(rows(4, seed=1)))
    assert_same_step(pipeline, plain, rows(3))


@pytest.mark.parametrize("batch_size", [1, 3])
def test_fewer_rows_than_chunks(pipe: Pipe, batch_size: int) -> None:
    """torch 2.13: raised an AssertionError on one rank and a ValueError on the other."""
    plain = perceptron(4)

    assert_same_step(pipe(plain, chunks=4), plain, rows(batch_size))


def test_micro_batches_cut_to_their_longest_sequence(pipe: Pipe) -> None:
    class Trim(nn.Module):
        """Cuts the padding off that all rows have; what follows works on fewer columns."""

        def forward(self, x: Tensor) -> Tensor:
            return x[:, : int((x != 0).any(-1).sum(1).max())]

    torch.manual_seed(3)
    lengths = [5, 4, 5, 2, 1, 3, 3]
    batch = pad_sequence([rows(k, seed=k).detach() for k in lengths], batch_first=True)
    pool = Call(lambda x: x.sum(1))
    plain = nn.Sequential(Trim(), nn.Linear(W, W, bias=False), pool, nn.Linear(W, W)).double()

    assert_same_steps(pipe(plain, stages=len(plain)), plain, [batch, batch[3:], batch])


# Decisions.


class Deeper(nn.Module):
    """Runs its layer as often as the values that it sees tell."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(W, W)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(1 + int(x.detach().abs().sum()) % 4):
            x = self.layer(x).tanh()
        return x


class Either(nn.Module):
    """One layer or another, by the values that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(W, W), nn.Linear(W, W)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[int(x.detach().sum() > 0)](x)


class Nothing(nn.Module):
    """Its input, or an output that belongs to no graph."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.detach().sum() > 0 else x.detach()


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("build", [Deeper, Either, Nothing])
def test_decision_by_values(pipe: Pipe, build: Callable[[], nn.Module], place: int) -> None:
    torch.manual_seed(3)
    layers: list[nn.Module] = [nn.Linear(W, W), nn.Tanh(), nn.Linear(W, W)]
    layers[place] = build()
    plain = nn.Sequential(*layers).double()

    assert_same_steps(
        pipe(plain, stages=len(plain)), Mapped(plain), [rows(7, seed=seed) for seed in range(8)]
    )


class Repeated(nn.Module):
    """Runs one layer and one batch norm a number of times, each time on its input."""

    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(W, W)
        self.norm = nn.BatchNorm1d(W) if norm else nn.Identity()
        self.times = 1

    def forward(self, x: Tensor) -> Tensor:
        runs = [self.norm(x * (k + 1)) + self.layer(x).sin() for k in range(self.times)]
        return sum(runs, start=x)


def set_times(module: nn.Module, times: int) -> None:
    for each in module.modules():
        if isinstance(each, Repeated):
            each.times = times


def test_layer_that_runs_an_inner_layer_a_number_of_times(pipe: Pipe) -> None:
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(W, W), Repeated(norm=False), Repeated(norm=False)).double()
    pipeline = pipe(plain, stages=len(plain))

    for times in (1, 3, 0, 2):
        for module in (plain, pipeline):
            set_times(module, times)
        assert_same_steps(pipeline, plain, [rows(7)])
        assert ("1.layer.weight" in gradients(pipeline)) == (times > 0)


def test_batch_norm_that_runs_a_number_of_times(pipe: Pipe) -> None:
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(W, W), Repeated(norm=True), nn.Tanh()).double()
    pipeline = pipe(plain, stages=len(plain))

    for times in (1, 3, 0, 2):
        for module in (plain, pipeline):
            set_times(module, times)
            step(module, rows(7))
        assert_same(dict(pipeline.named_buffers()), dict(plain.named_buffers()))
    assert pipeline.get_buffer("1.norm.num_batches_tracked") == 6


class NormsIfPositive(nn.Module):
    """A batch norm that only some micro-batches meet."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(W)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) if x[0, 0] > 0 else x


def test_batch_norm_that_some_micro_batches_meet(pipe: Pipe) -> None:
    plain = nn.Sequential(nn.Identity(), NormsIfPositive()).double()
    pipeline, x = pipe(plain, stages=len(plain)), rows(7).detach()
    x[:, 0] = torch.tensor([1, 1, 1, -1, -1, 1, 1])

    step(pipeline, x.requires_grad_())
    plain(x[[0, 1, 2, 5, 6]])

    assert_same(dict(pipeline.named_buffers()), dict(plain.named_buffers()))
