"""Transparency: the same numbers for any balance, chunks, recomputation and devices.

A pipeline must give the output, the loss, the gradient of every parameter and of the input that
the plain nn.Sequential gives; up to the order of floating-point sums, so all is in float64.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.models import (
    Call,
    Counting,
    Fork,
    Through,
    assert_same,
    assert_same_step,
    gradients,
    perceptron,
    rows,
    step,
    whole_batch_loss,
)
from tests.support.pipes import MODES, Pipe, every_mode, with_and_without_threads
from tests.support.process import seeded

W = 3  # the width of all layers


@every_mode
@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(Fork(W), Through(nn.Tanh()), Through(nn.Linear(W, W)), nn.Identity()),
        nn.Sequential(nn.Linear(W, W), Call(lambda x: (x, x, x.detach() * 2)), nn.Identity()),
        nn.Sequential(nn.Linear(W, W), Call(lambda x: (x.argmax(1), x > 0, x)), nn.Identity()),
        nn.Sequential(nn.Linear(W, W), Call(lambda x: {"x": x, "name": "y", "n": None})),
        nn.Sequential(nn.Linear(W, W), Call(lambda x: x.t()), Call(lambda x: x.t().tanh())),
    ],
    ids=["integers pass", "twice and detached", "integers first", "no tensors", "transposed"],
)
def test_outputs_of_every_kind(module: nn.Sequential, pipe: Pipe) -> None:
    module = deepcopy(module).double()
    pipeline = pipe(module)

    assert_same_step(pipeline, module, rows(7))


def test_output_without_a_gradient(pipe: Pipe) -> None:
    module = nn.Sequential(nn.Linear(W, W), nn.Tanh(), Call(lambda x: x.argmax(1))).double()

    classes = pipe(module)(rows(7))

    assert torch.equal(classes, module(rows(7)))
    assert not classes.requires_grad


@every_mode
def test_edit_in_place_of_the_pipelines_input(pipe: Pipe) -> None:
    module = nn.Sequential(nn.ReLU(inplace=True), *perceptron(3))
    pipeline = pipe(module)

    for _ in range(2):
        x = rows(7).detach()
        assert_same_step(pipeline, module, x)


@every_mode
def test_gradients_accumulate(pipe: Pipe) -> None:
    module = perceptron(4)
    pipeline = pipe(module)

    for seed in range(3):
        batch = rows(5 + seed, seed=seed)
        assert_same_step(pipeline, module, batch)


def test_learning(pipe: Pipe) -> None:
    module = perceptron(4)
    pipeline = pipe(module)
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.1) for each in (module, pipeline)]

    for seed in range(5):
        for each, optimizer in zip((module, pipeline), optimizers, strict=True):
            optimizer.zero_grad()
            step(each, rows(5, seed=seed))
            optimizer.step()

    assert_same(pipeline.state_dict(), module.state_dict())


def autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize("enter", [torch.no_grad, torch.inference_mode, nullcontext, autocast])
@pytest.mark.parametrize("training", [True, False])
def test_modes_of_the_caller(enter: Callable[[], Any], training: bool, pipe: Pipe) -> None:
    # A kernel may add up in another order for another number of rows.
    dtype, tolerance = (torch.float32, 2e-2) if enter is autocast else (torch.float64, 1e-9)
    module = perceptron(4).to(dtype).train(training)
    pipeline = pipe(module)
    x = rows(6).detach().to(dtype)

    with enter():
        actual, expected = pipeline(x), module(x)

    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    assert actual.requires_grad == expected.requires_grad
    assert actual.is_inference() == expected.is_inference()
    assert not gradients(pipeline)


@every_mode
def test_autocast_holds_in_backward(pipe: Pipe) -> None:
    module = perceptron(4).float()
    pipeline = pipe(module)
    x = rows(6).detach().float()

    for each in (module, pipeline):
        with autocast():
            y = each(x)
        y.float().square().sum().backward()

    # Sums in bfloat16 are taken over micro-batches.
    torch.testing.assert_close(gradients(pipeline), gradients(module), rtol=2e-2, atol=1e-2)


@with_and_without_threads
def test_dropout_is_the_same_under_a_seed(pipe: Pipe) -> None:
    module = nn.Sequential(*(nn.Sequential(nn.Linear(W, W), nn.Dropout()) for _ in range(4)))
    module.double()
    steps = []

    for mode in MODES:
        with seeded():
            pipeline = pipe(module, mode=mode)
            steps.append([step(pipeline, rows(8))._asdict() for _ in range(2)])

    for other in steps[1:]:
        assert_same(other, steps[0])
    assert not torch.equal(steps[0][0]["output"], steps[0][1]["output"])


def test_edit_in_place_without_gradients_in_a_model_that_draws(pipe: Pipe) -> None:
    """Once a forward that was run again, to know its draws, edited the input twice."""
    pipeline = pipe(nn.Sequential(Call(lambda x: x.mul_(2)), nn.Dropout(1e-9)))

    for _ in range(2):
        with torch.no_grad():
            y = pipeline(torch.ones(6, 2, dtype=torch.float64))
        torch.testing.assert_close(y, torch.full((6, 2), 2.0, dtype=torch.float64))


def test_buffers_of_a_model_that_draws_are_updated_once(pipe: Pipe) -> None:
    pipeline = pipe(nn.Sequential(Counting(), nn.Dropout(), nn.Linear(W, W), Counting()).double())

    pipeline(rows(6))

    assert [buffer.item() for buffer in pipeline.buffers()] == [3, 3]


def test_dropout_that_sets_in_after_some_steps(pipe: Pipe) -> None:
    module = nn.Sequential(nn.Linear(W, W), nn.Dropout(0.0), nn.Linear(W, W)).double()
    steps = []

    for mode in MODES:
        pipeline = pipe(module, mode=mode)
        step(pipeline, rows(6))
        pipeline.zero_grad()
        dropout = pipeline[1]
        assert isinstance(dropout, nn.Dropout)
        dropout.p = 0.5
        with seeded():
            steps.append(step(pipeline, rows(6))._asdict())

    for other in steps[1:]:
        assert_same(other, steps[0])


def test_input_made_in_inference_mode(pipe: Pipe) -> None:
    with torch.inference_mode():
        x = torch.ones(6, W, dtype=torch.float64)
    module = perceptron(4)
    module[0].requires_grad_(False)
    pipeline = pipe(module)

    for each in (module, pipeline):
        each(x).sum().backward()

    assert_same(gradients(pipeline), gradients(module))


@every_mode
def test_eval_between_forward_and_backward(pipe: Pipe) -> None:
    """Once recomputation ran in eval mode, without dropout: the gradients were of another model."""
    module = nn.Sequential(nn.Linear(W, W), nn.Dropout(), nn.Linear(W, W)).double()
    pipeline = pipe(module)
    with seeded():
        expected = step(pipeline, rows(6))
    pipeline.zero_grad()
    with seeded():
        output = pipeline(rows(6))

    pipeline.eval()
    whole_batch_loss(output).backward()

    assert_same(gradients(pipeline), expected.gradients)
    assert not any(layer.training for layer in pipeline)


@with_and_without_threads
def test_buffers_that_change_are_found_again_by_recomputation(pipe: Pipe) -> None:
    """Once recomputation took one more step of the power iteration: gradients of another weight."""
    torch.manual_seed(2)
    module = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(W, W)),
        Counting(),
        nn.BatchNorm1d(W),
        nn.utils.parametrizations.spectral_norm(nn.Linear(W, W)),
    ).double()
    ends = []

    for mode in MODES:
        pipeline = pipe(module, mode=mode, deferred_batch_norm=False)
        ends.append([step(pipeline, rows(9))._asdict() for _ in range(2)])
        ends[-1].append(dict(pipeline.named_buffers()))

    for other in ends[1:]:
        assert_same(other, ends[0])
    assert ends[0][-1]["1.calls"] == 6
