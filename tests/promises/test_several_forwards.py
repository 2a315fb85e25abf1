"""Transparency: forwards and backwards run in any order that the plain module allows.

Each forward keeps its own activations or inputs, and a recomputation in between must use the
layers, training mode, buffers and random numbers of its forward.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe.core.schedules import ActivationCheckpointing
from tests.support.models import a_loss, assert_same, assert_same_ends, gradients, perceptron, rows
from tests.support.pipes import Pipe, every_mode, with_and_without_threads
from tests.support.process import seeded

pytestmark = every_mode

W = 3


@pytest.fixture
def plain() -> nn.Sequential:
    torch.manual_seed(3)
    return perceptron(4)


# Orders.


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]], ids=str)
def test_three_forwards_and_their_backwards(
    pipe: Pipe, plain: nn.Sequential, order: list[int]
) -> None:
    def run(module: nn.Module) -> list[Tensor]:
        inputs = [rows(4 + k, seed=k) for k in range(3)]
        losses = [a_loss(module(x)) for x in inputs]
        for k in order:
            losses[k].backward()
        return [x.grad for x in inputs if x.grad is not None]

    assert_same_ends(run, pipe(plain), plain)


@with_and_without_threads
def test_three_forwards_before_one_backward(pipe: Pipe, plain: nn.Sequential) -> None:
    def run(module: nn.Module) -> list[Tensor]:
        outputs = [module(rows(4 + k, seed=k)) for k in range(3)]
        loss = a_loss(torch.cat(outputs)) * outputs[1].mean()
        loss.backward()
        return [loss.detach()]

    assert_same_ends(run, pipe(plain), plain)


def test_contrast_of_two_views(pipe: Pipe, plain: nn.Sequential) -> None:
    def run(module: nn.Module) -> list[Tensor]:
        one, other = module(rows(7)), module(rows(7, seed=1))
        loss = nn.functional.cross_entropy(one @ other.t(), torch.arange(7))
        loss.backward()
        return [loss.detach()]

    assert_same_ends(run, pipe(plain), plain)


def test_backwards_and_forwards_by_turns(pipe: Pipe, plain: nn.Sequential) -> None:
    def run(module: nn.Module) -> list[Tensor]:
        ahead = module(rows(7))
        for seed in range(1, 4):
            now, ahead = ahead, module(rows(7, seed=seed))
            a_loss(now).backward()
        return [ahead.detach()]

    assert_same_ends(run, pipe(plain), plain)


@with_and_without_threads
def test_output_as_the_next_input_several_times(pipe: Pipe, plain: nn.Sequential) -> None:
    def run(module: nn.Module) -> list[Tensor]:
        x = state = rows(7)
        for _ in range(3):
            state = module(state) + x
        a_loss(state).backward()
        assert x.grad is not None
        return [x.grad]

    assert_same_ends(run, pipe(plain), plain)


def test_forward_that_is_kept_and_never_used(pipe: Pipe, plain: nn.Sequential) -> None:
    kept: list[Tensor] = []

    def run(module: nn.Module) -> list[Tensor]:
        kept.append(module(rows(5, seed=1)))
        y = module(rows(7))
        kept.append(module(rows(3, seed=2)))
        a_loss(y).backward()
        return [y.detach()]

    assert_same_ends(run, pipe(plain), plain)
    assert all(y.requires_grad for y in kept)


def test_forward_that_goes_before_its_backward(pipe: Pipe, plain: nn.Sequential) -> None:
    def run(module: nn.Module) -> list[Tensor]:
        y = module(rows(5, seed=1))
        del y
        a_loss(module(rows(7))).backward()
        return []

    assert_same_ends(run, pipe(plain), plain)


def test_losses_that_are_weighed_by_gradients(pipe: Pipe, plain: nn.Sequential) -> None:
    def run(module: nn.Module) -> list[Tensor]:
        weight = next(module.parameters())
        norms = []
        for seed in range(2):
            loss = a_loss(module(rows(7, seed=seed)))
            (gradient,) = torch.autograd.grad(loss, weight)
            norms.append(gradient.norm())
        (a_loss(module(rows(7))) * norms[0] / norms[1]).backward()
        return norms

    assert_same_ends(run, pipe(plain), plain)


# Other modes in between.


@pytest.mark.parametrize("enter", [torch.no_grad, torch.inference_mode], ids=lambda f: f.__name__)
def test_forward_without_gradients_in_between(
    pipe: Pipe, plain: nn.Sequential, enter: Callable[[], Any]
) -> None:
    def run(module: nn.Module) -> list[Tensor]:
        y = module(rows(7))
        with enter():
            target = module(rows(7, seed=1))
        loss = ((y - target.clone()) ** 2).exp().sum()
        loss.backward()
        return [loss.detach()]

    assert_same_ends(run, pipe(plain), plain)


def normalised() -> nn.Sequential:
    """The statistics of its batch norm do not depend on how the batch is cut."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(W, W), nn.BatchNorm1d(W), nn.Tanh(), nn.Linear(W, W)).double()


# With one micro-batch, what it is normalised by is the plain module's; with more, only the
# statistics are.
@pytest.mark.parametrize("gradients_in_eval", [False, True])
def test_evaluation_in_between_with_batch_norm(pipe: Pipe, gradients_in_eval: bool) -> None:
    plain = normalised()

    def run(module: nn.Module) -> list[Tensor]:
        y = module(rows(7))
        module.eval()
        with torch.set_grad_enabled(gradients_in_eval):
            z = module(rows(5, seed=1))
        module.train()
        a_loss(y).backward()
        return [y.detach(), z.detach()]

    assert_same_ends(run, pipe(plain, chunks=1), plain)


def test_running_statistics_with_evaluations_in_between(pipe: Pipe) -> None:
    plain = normalised()
    pipeline = pipe(plain)

    for module in (plain, pipeline):
        for seed in range(3):
            loss = a_loss(module(rows(7, seed=seed)))
            module.eval()
            with torch.no_grad():
                module(rows(5, seed=9))
            module.train()
            loss.backward()

    assert_same(dict(pipeline.named_buffers()), dict(plain.named_buffers()))
    assert pipeline.get_buffer("1.num_batches_tracked") == 3


def test_training_forwards_with_batch_norm(pipe: Pipe) -> None:
    plain = normalised()

    def run(module: nn.Module) -> list[Tensor]:
        losses = [a_loss(module(rows(7, seed=k))) for k in range(2)]
        for loss in reversed(losses):
            loss.backward()
        return [loss.detach() for loss in losses]

    assert_same_ends(run, pipe(plain, chunks=1), plain)


def test_statistics_that_move_between_an_evaluation_and_its_backward(
    pipe: Pipe, mode: ActivationCheckpointing
) -> None:
    """The plain module takes the moved ones, without an error, for a gradient that is none."""
    plain = normalised().eval()
    pipeline = pipe(plain)
    a_loss(plain(rows(7))).backward()

    loss = a_loss(pipeline(rows(7)))
    pipeline.train()
    pipeline(rows(6, seed=1))

    if mode == "always":  # recomputation has those of its forward
        loss.backward()
        assert_same(gradients(pipeline), gradients(plain))
    else:
        with pytest.raises(RuntimeError, match="edited between a forward"):
            loss.backward()


def dropping() -> nn.Sequential:
    torch.manual_seed(3)
    layers = [nn.Linear(W, W), nn.Dropout(), nn.Linear(W, W), nn.Dropout()]
    return nn.Sequential(*layers).double()


def test_other_forwards_in_between_with_dropout(pipe: Pipe) -> None:
    pipeline, undisturbed = pipe(dropping()), pipe(dropping(), mode="never")

    def ends(module: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
        a_loss(y).backward()
        assert x.grad is not None
        return [y.detach(), x.grad, *gradients(module).values()]

    def alone() -> list[Tensor]:
        x = rows(7)
        return ends(undisturbed, x, undisturbed(x))

    def among_others() -> list[Tensor]:
        x = rows(7)
        y = pipeline(x)
        pipeline(rows(5, seed=1))
        pipeline.eval()
        with torch.no_grad():
            pipeline(rows(5, seed=2))
        torch.rand(3)
        return ends(pipeline, x, y)

    with seeded():
        expected = alone()
    with seeded():
        assert_same(among_others(), expected)


def test_evaluation_in_between_with_dropout_draws_nothing(pipe: Pipe) -> None:
    pipeline = pipe(dropping()).eval()
    plain = dropping().eval()

    with seeded(), torch.no_grad():
        y, number = pipeline(rows(7)), torch.rand(2)

    assert_same(y, plain(rows(7)).detach())
    with seeded():
        assert_same(number, torch.rand(2))
