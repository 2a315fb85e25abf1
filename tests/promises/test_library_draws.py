"""Transparency: layers that draw from Python's ``random`` or from ``numpy.random``.

A process has one of each, so with threads the stages would draw by turns in any order.
"""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe.core.pipeline import GPipe
from lightning_gpipe.core.schedules import ActivationCheckpointing
from tests.support.models import a_loss, assert_same, gradients, perceptron, rows
from tests.support.pipes import M, Pipe, every_mode

Draw = Callable[[], float]
DRAWS: dict[str, Draw] = {
    "random": lambda: random.random(),  # as methods a copied layer would have generators of its own
    "numpy.random": lambda: np.random.rand(),
}
every_library = pytest.mark.parametrize("library", DRAWS)


class Drawing(nn.Module):
    """Scales by a number that a library draws."""

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.draw = draw
        self.on = True

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + self.draw() if self.on else 2)


def drawing(library: str) -> nn.Sequential:
    """A layer that draws in the first of two stages."""
    return nn.Sequential(perceptron(2), Drawing(DRAWS[library]), *perceptron(2)).double()


def seed() -> None:
    random.seed(5)
    np.random.seed(5)


@every_mode
@every_library
def test_on_one_thread_the_numbers_are_drawn_again(pipe: Pipe, library: str) -> None:
    """Once a recomputation drew other numbers, and the gradients were wrong."""
    plain = drawing(library)
    pipeline = pipe(plain, [2, 2], threads=False)
    ends = []

    for module in (plain, pipeline):
        seed()
        for k in range(3):
            x = rows(7, seed=k).detach()
            parts = x.tensor_split(M) if module is plain else [x]
            a_loss(torch.cat([module(each) for each in parts])).backward()
        ends.append((gradients(module), random.random(), np.random.rand()))

    assert_same(ends[1], ends[0])


@every_mode
@every_library
def test_on_threads_they_are_refused_if_they_are_needed_again(
    pipe: Pipe, library: str, mode: ActivationCheckpointing
) -> None:
    pipeline = pipe(drawing(library), [2, 2])

    if mode == "never":
        with pytest.warns(UserWarning, match=f"{library} drew random numbers while the stages"):
            pipeline(rows(7))
        pipeline(rows(7))  # told once
    else:
        with pytest.raises(RuntimeError, match=f"{library} drew random .* threads=False"):
            pipeline(rows(7))


@every_library
def test_first_draw_in_a_later_step(pipe: Pipe, library: str) -> None:
    pipeline = pipe(drawing(library), [2, 2], threads=False)
    layer = pipeline[1]
    assert isinstance(layer, Drawing)
    layer.on = False
    for _ in range(3):
        pipeline(rows(7)).sum().backward()

    layer.on = True
    with pytest.raises(RuntimeError, match=f"{library} drew random numbers for the first time"):
        pipeline(rows(7))


@every_library
def test_drawing_between_forwards_is_not_the_layers(pipe: Pipe, library: str) -> None:
    pipeline = pipe(perceptron(4))

    for _ in range(4):
        DRAWS[library]()
        pipeline(rows(7)).sum().backward()


class LaterDropout(nn.Module):
    """Draws from PyTorch's generator from the third step on."""

    steps = 0

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x) if self.steps > 1 else x


class Noise(nn.Module):
    """Draws from Python's generator in every step."""

    def forward(self, x: Tensor) -> Tensor:
        return x * random.random()


def test_forward_that_runs_again_draws_the_same(pipe: Pipe) -> None:
    """It runs again with private generators once PyTorch's are drawn from for the first time."""
    plain = nn.Sequential(Noise(), nn.Linear(3, 3), LaterDropout()).double()
    pipeline = pipe(plain, [2, 1], chunks=1, threads=False)

    after = []
    for module in (plain, pipeline):
        random.seed(5)
        for step in range(4):
            for layer in module:
                if isinstance(layer, LaterDropout):
                    layer.steps = step
            module(rows(7)).sum().backward()
        after.append(random.random())
    assert after[0] == after[1]


def stepping(pipeline: GPipe, draw: Draw = lambda: 0.0) -> None:
    """A step with a loss for each micro-batch, which draws too."""
    loss = pipeline.by_micro_batch(
        lambda x: pipeline(x).square().mean() * (1 + draw()), rows(7).detach()
    ).loss
    assert loss is not None
    loss.backward()


@every_mode
@every_library
def test_steps_by_micro_batch_on_one_thread(pipe: Pipe, library: str) -> None:
    plain = drawing(library)
    pipeline = pipe(plain, [2, 2], threads=False)
    ends = []

    for module in (plain, pipeline):
        seed()
        for _ in range(3):
            if isinstance(module, GPipe):
                stepping(module)
            else:
                parts = rows(7).detach().tensor_split(M)
                torch.cat([module(each) for each in parts]).square().mean().backward()
        ends.append((gradients(module), random.random(), np.random.rand()))

    assert_same(ends[1], ends[0])


@every_mode
@every_library
def test_steps_by_micro_batch_on_threads(
    pipe: Pipe, library: str, mode: ActivationCheckpointing
) -> None:
    """Once nothing told of it, and a recomputation drew other numbers."""
    pipeline = pipe(drawing(library), [2, 2])

    if mode == "never":
        with pytest.warns(UserWarning, match=f"{library} drew random numbers while the stages"):
            stepping(pipeline)
        stepping(pipeline)
    else:
        with pytest.raises(RuntimeError, match=f"{library} drew random .* threads=False"):
            stepping(pipeline)


@every_library
def test_draws_of_a_step_are_not_the_layers(pipe: Pipe, library: str) -> None:
    pipeline = pipe(perceptron(4))

    for _ in range(4):
        stepping(pipeline, DRAWS[library])
