"""Transparency: edits of the batch and of outputs affect neither the user nor the layers.

A user may write the next batch into the same memory, or edit an output for the loss; a layer may
edit its input or ask for its gradient. The plain module sees each of these at once. Here a stage
keeps its inputs for a recomputation, and runs on slices of the batch.

Here are also the tests of ``forbidden_edits``.
"""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe.core.schedules import ActivationCheckpointing
from tests.support.models import (
    Call,
    a_loss,
    assert_same,
    assert_same_step,
    gradients,
    perceptron,
    rows,
)
from tests.support.pipes import RECOMPUTED, Pipe, every_mode, with_and_without_threads

# Edits of the batch.


@with_and_without_threads
@every_mode
def test_batch_edited_between_forward_and_backward(
    pipe: Pipe, mode: ActivationCheckpointing
) -> None:
    pipeline = pipe(nn.Sequential(nn.Tanh(), *perceptron(3)))
    x = rows(7).detach()
    loss = a_loss(pipeline(x))

    x.clamp_(-0.1, 0.1)

    if RECOMPUTED[mode]:
        with pytest.raises(RuntimeError, match="input of stage 0 .* must not be edited"):
            loss.backward()
    else:
        loss.backward()  # tanh has saved its output, which was not edited


def test_buffer_that_every_batch_is_written_into(pipe: Pipe) -> None:
    plain = perceptron()
    pipeline = pipe(plain)
    static = torch.zeros(7, 3, dtype=torch.float64)

    for seed in range(3):
        static.copy_(rows(7, seed=seed).detach())  # after the backward of the one before
        assert_same_step(pipeline, plain, static)


@every_mode
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("last", [nn.Identity, lambda: Call(lambda h: h[:, 1:])])
def test_output_edited_in_place_that_is_a_view_of_the_last_stages_input(
    pipe: Pipe, last: Callable[[], nn.Module], chunks: int
) -> None:
    plain = nn.Sequential(*perceptron(3), last())
    pipeline = pipe(plain, [3, 1], chunks=chunks)

    def run(module: nn.Module) -> Tensor:
        output = module(rows(7))
        output -= 0.5
        loss = a_loss(output)
        loss.backward()
        return loss

    assert_same((run(pipeline), gradients(pipeline)), (run(plain), gradients(plain)))


@with_and_without_threads
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("chunks", [1, 3])
def test_first_layer_that_works_in_place_leaves_the_batch_alone(
    pipe: Pipe, grad: bool, chunks: int
) -> None:
    plain = nn.Sequential(nn.ReLU(inplace=True), *perceptron(3))
    pipeline = pipe(plain, chunks=chunks)

    with torch.set_grad_enabled(grad):
        for seed in range(3):
            x = rows(7, seed=seed).detach()
            before = x.clone()
            assert_same(pipeline(x), plain(before.clone()))
            assert torch.equal(x, before)


class Residual(nn.Module):
    """Uses again what its first layer has edited."""

    def __init__(self, *, inplace: bool) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3).double()
        self.layers: Any = nn.Sequential(nn.ReLU(inplace=inplace), *perceptron(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        output: Tensor = self.layers(h) + h
        return output


@with_and_without_threads
@pytest.mark.parametrize("by_micro_batch", [False, True])
def test_first_layer_that_works_in_place_is_warned_of(pipe: Pipe, by_micro_batch: bool) -> None:
    """Once the sum had the input as it was before the edit, and nobody said so."""
    module = Residual(inplace=True)
    module.layers = pipe(module.layers, chunks=2)

    def step() -> None:
        if by_micro_batch:
            module.layers.by_micro_batch(lambda x: a_loss(module(x)), rows(4))
        else:
            a_loss(module(rows(4))).backward()

    with pytest.warns(UserWarning, match=r"got an edit by layer 0 \(ReLU\)"):
        step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()


@with_and_without_threads
def test_layers_that_work_in_place_elsewhere_are_not_warned_of(pipe: Pipe) -> None:
    plain = Residual(inplace=False)
    plain.layers[2] = nn.ReLU(inplace=True)
    pipeline = copy.deepcopy(plain)
    pipeline.layers = pipe(pipeline.layers)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(pipeline(rows(7)), plain(rows(7)))


# Inputs that a layer wants the gradient of.


class Forces(nn.Module):
    """Returns what a potential gives, and its gradient by the input, as models of molecules do."""

    def __init__(self) -> None:
        super().__init__()
        self.potential = perceptron()

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x.requires_grad_()
            energy = self.potential(x).sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=self.training)
        return force


@with_and_without_threads
@every_mode
@pytest.mark.parametrize("chunks", [1, 3])
def test_input_whose_gradient_a_layer_asks_for(pipe: Pipe, chunks: int) -> None:
    plain = nn.Sequential(Forces(), *perceptron(2))
    pipeline = pipe(plain, [1, 2], chunks=chunks)
    x = rows(7).detach()

    for _ in range(2):  # gradients accumulate
        for module, batch in ((pipeline, x), (plain, x.clone())):
            a_loss(module(batch)).backward()
        assert_same(gradients(pipeline), gradients(plain))
        assert not x.requires_grad, "the layer asked of the slices that it got"
        assert x.grad is None


@every_mode
def test_input_of_a_later_stage_whose_gradient_a_layer_asks_for(pipe: Pipe) -> None:
    plain = nn.Sequential(*perceptron(2), Forces())
    plain[:2].requires_grad_(False)

    assert_same_step(pipe(plain, [2, 1]), plain, rows(7).detach())
