"""Transparency: split backwards compute the same as combined ones."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.utils.checkpoint import checkpoint

from lightning_gpipe.core.schedules import Kind
from tests.support.models import assert_same_step, assert_same_steps, perceptron, rows, step
from tests.support.pipes import Pipe, every_mode, with_and_without_threads


@every_mode
@with_and_without_threads
def test_steps_on_looped_stages(pipe: Pipe) -> None:
    plain = perceptron(depth=8)

    pipeline = pipe(plain, stages=4, devices=2, split_backward=True)

    assert_same_steps(pipeline, plain, [rows(7), rows(2), rows(7)])


@with_and_without_threads
def test_weights_are_an_action_of_their_own(pipe: Pipe) -> None:
    pipeline = pipe(perceptron(), split_backward=True, mode=1)

    step(pipeline, rows(7))

    timeline = pipeline.timeline
    assert timeline is not None
    for w in range(2):
        order = [str(span.action) for span in timeline.spans if span.worker == w]
        assert order[3:] == ["B2", "W2", "B1", "W1", "R0", "B0", "W0"]
    assert {span.action.kind.verb for span in timeline.spans} >= {"backward", "weights"}


def test_evaluation_has_no_backward_to_split(pipe: Pipe) -> None:
    pipeline = pipe(perceptron(), split_backward=True)

    with torch.no_grad():
        pipeline(rows(7))

    assert pipeline.timeline is not None
    assert {span.action.kind for span in pipeline.timeline.spans} == {Kind.FORWARD}


class Failing(Function):
    """A function of weights alone, whose backward fails."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ArithmeticError("no gradient")


class Masked(nn.Linear):
    """Its weight is computed from a parameter."""

    fails = False

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = Failing.apply(self.weight) if self.fails else self.weight
        return nn.functional.linear(x, weight, self.bias)


@with_and_without_threads
def test_error_in_the_weights_says_where_and_the_next_step_is_sound(pipe: Pipe) -> None:
    plain = perceptron()
    plain[2] = Masked(3, 3).double()
    pipeline = pipe(plain, split_backward=True, mode="never")
    layer = pipeline[2]
    assert isinstance(layer, Masked)
    layer.fails = True

    with pytest.raises(ArithmeticError, match="no gradient") as error:
        step(pipeline, rows(7))

    [note] = error.value.__notes__
    assert note.startswith("raised in weights of micro-batch 2 of 3 on stage 1 (layers 2..3")
    layer.fails = False
    pipeline.zero_grad()
    assert_same_step(pipeline, plain, rows(7))


@every_mode
def test_dropped_mini_batch_leaves_nothing(pipe: Pipe) -> None:
    """A forward without a backward, and then a step."""
    plain = perceptron()
    pipeline = pipe(plain, split_backward=True)
    pipeline(rows(7))

    assert_same_step(pipeline, plain, rows(7))


class Reentrant(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(super().forward, x, use_reentrant=True)
        return output.tanh()


@every_mode
@with_and_without_threads
def test_layer_with_a_reentrant_checkpoint(pipe: Pipe) -> None:
    """Its node is written in Python, but refuses a backward to some leaves, which B was."""
    plain = nn.Sequential(nn.Linear(3, 3), *(Reentrant(3, 3) for _ in range(3))).double()

    assert_same_steps(pipe(plain, split_backward=True), plain, [rows(7), rows(4)])
