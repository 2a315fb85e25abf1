"""Same numbers: random numbers drawn in backward are reproducible, and never repeat."""

import random
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.utils.checkpoint import checkpoint

from lightning_gpipe.core.pipeline import GPipe
from tests.support.models import Call, rows, step, whole_batch_loss
from tests.support.pipes import MODES, Pipe, every_mode, with_and_without_threads

pytestmark = pytest.mark.usefixtures("own_generator")

W, N, CHUNKS = 3, 3, 4
STEPS = 20
UNEVEN = random.Random()  # not the generator of Python's random, whose draws a pipeline notices


class Rounded(Function):
    """Rounds its gradient at random."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(UNEVEN.uniform(0.0, 0.001))
        return gradient + torch.rand_like(gradient)


def noised(gradient: Tensor) -> Tensor:
    time.sleep(UNEVEN.uniform(0.0, 0.001))
    return gradient + torch.randn_like(gradient)


def hooked(x: Tensor) -> Tensor:
    y = x * 1
    if y.requires_grad:
        y.register_hook(noised)
    return y


class Noise(nn.Module):
    """A layer that draws in backward, and records what it drew with."""

    def __init__(self, layer: Callable[[Tensor], Tensor], on: bool = True) -> None:
        super().__init__()
        self.layer = layer
        self.on = on

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if self.on else x * 1


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {"a hook": hooked, "a function": Rounded.apply}

each_draw = pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)


def drawing(draw: Callable[[Tensor], Tensor], *, on: bool = True) -> nn.Sequential:
    """Stages of three layers, of which one draws in backward."""
    torch.manual_seed(1)
    make: list[Callable[[], nn.Module]] = [lambda: nn.Linear(W, W), lambda: Noise(draw, on)]
    return nn.Sequential(*(layer() for layer in [*make, nn.Tanh] * N)).double()


def turn(module: Iterable[nn.Module], on: bool) -> None:
    """Let the layers draw, or not."""
    for layer in module:
        if isinstance(layer, Noise):
            layer.on = on


def seeded_steps(pipeline: GPipe, count: int = 2) -> list[Tensor]:
    """The gradients of the input, of steps under one seed, and the state of the generator."""
    torch.manual_seed(5)
    found = [step(pipeline, rows(8)).input_gradients[0] for _ in range(count)]
    return [*found, torch.get_rng_state()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


@each_draw
def test_steps_repeated(draw: Callable[[Tensor], Tensor], pipe: Pipe) -> None:
    """Once workers drew from one generator at once, each in its own time."""
    pipeline = pipe(drawing(draw), stages=N, chunks=CHUNKS)

    runs = [seeded_steps(pipeline) for _ in range(STEPS)]

    assert all(same(run, runs[0]) for run in runs)


@each_draw
def test_first_steps_in_every_mode_with_and_without_threads(
    draw: Callable[[Tensor], Tensor], pipe: Pipe
) -> None:
    runs = [
        seeded_steps(pipe(drawing(draw), stages=N, chunks=CHUNKS, mode=mode, threads=threads))
        for mode in MODES
        for threads in (True, False)
    ]

    assert all(same(run, runs[0]) for run in runs)


class Recorded(Function):
    """Records what it draws in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, drawn: list[float]) -> Tensor:
        ctx.drawn = drawn
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.drawn.append(torch.rand(()).item())
        return gradient, None


@every_mode
@with_and_without_threads
def test_no_number_is_drawn_twice(pipe: Pipe) -> None:
    """Once the generator was put back after backward: the same numbers in every step."""
    drawn: list[float] = []
    layers = [Call(lambda x: Recorded.apply(x, drawn)) for _ in range(N)]
    pipeline = pipe(nn.Sequential(*layers), stages=N, chunks=CHUNKS)

    for _ in range(3):
        step(pipeline, rows(8))

    assert len(set(drawn)) == len(drawn) == 3 * N * CHUNKS


@with_and_without_threads
def test_two_forwards_before_their_backwards_draw_other_numbers(pipe: Pipe) -> None:
    drawn: list[float] = []
    pipeline = pipe(nn.Sequential(*(Call(lambda x: Recorded.apply(x, drawn)) for _ in range(N))))

    sum(whole_batch_loss(pipeline(rows(8))) for _ in range(2)).backward()  # type: ignore[union-attr]

    assert len(set(drawn)) == len(drawn)


def test_forward_and_backward_draw_other_numbers(pipe: Pipe) -> None:
    drawn: list[float] = []

    def both(x: Tensor) -> Tensor:
        drawn.append(torch.rand(()).item())
        return Recorded.apply(x, drawn)

    step(pipe(nn.Sequential(Call(both), Call(both)), mode="never"), rows(8))

    assert len(set(drawn)) == len(drawn)


@each_draw
@pytest.mark.parametrize("chunks", [1, CHUNKS])
def test_lone_worker_draws_from_the_generator_itself(
    draw: Callable[[Tensor], Tensor], chunks: int, pipe: Pipe
) -> None:
    plain = drawing(draw)
    pipeline = pipe(plain, devices=1, chunks=chunks)

    torch.manual_seed(5)
    expected = [step(plain, rows(8)).input_gradients[0] for _ in range(2)]

    if chunks == 1:
        assert same(seeded_steps(pipeline)[:2], expected)
    assert same(seeded_steps(pipeline), seeded_steps(pipeline))


@with_and_without_threads
def test_model_that_draws_nothing_leaves_the_generator(pipe: Pipe) -> None:
    pipeline = pipe(drawing(hooked, on=False))
    before = torch.get_rng_state()

    for _ in range(3):
        step(pipeline, rows(8))

    assert torch.equal(torch.get_rng_state(), before)


@each_draw
@with_and_without_threads
def test_first_draws_in_a_later_backward(draw: Callable[[Tensor], Tensor], pipe: Pipe) -> None:
    """They are not redirected, and a backward cannot be run again."""
    pipeline = pipe(drawing(draw, on=False))
    step(pipeline, rows(8))
    turn(pipeline, on=True)
    before = torch.get_rng_state()

    with pytest.warns(UserWarning, match="in their first backward if they do in later ones"):
        first = step(pipeline, rows(8)).input_gradients[0]

    assert not torch.equal(torch.get_rng_state(), before)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = step(pipeline, rows(8)).input_gradients[0]
        assert not torch.equal(first, second)
        assert same(seeded_steps(pipeline), seeded_steps(pipeline))


def test_generator_after_first_draws_in_a_later_backward(pipe: Pipe) -> None:
    """Its state does not depend on how much was drawn from it, nor on timing."""
    states = []
    for draw in DRAWS.values():
        pipeline = pipe(drawing(draw, on=False))
        step(pipeline, rows(8))
        turn(pipeline, on=True)
        torch.manual_seed(5)
        with pytest.warns(UserWarning, match="in their first backward"):
            step(pipeline, rows(8))
        states.append(torch.get_rng_state())

    assert torch.equal(*states)


@pytest.mark.parametrize("use_reentrant", [False, True])
@with_and_without_threads
def test_layers_that_checkpoint_themselves_draw_nothing(use_reentrant: bool, pipe: Pipe) -> None:
    """They set the generator in backward, and put back what another stage had set."""

    def slow(x: Tensor) -> Tensor:
        time.sleep(UNEVEN.uniform(0.0, 0.002))
        return x.tanh()

    own = [Call(lambda x: checkpoint(slow, x, use_reentrant=use_reentrant)) for _ in range(N)]
    module = nn.Sequential(nn.Linear(W, W), *own, nn.Dropout()).double()
    pipeline = pipe(module, mode="never", chunks=CHUNKS)

    for _ in range(5):
        loss = whole_batch_loss(pipeline(rows(8)))
        before = torch.get_rng_state()
        loss.backward()
        assert torch.equal(torch.get_rng_state(), before)


def test_backward_that_fails_leaves_the_generator(pipe: Pipe) -> None:
    def fail(gradient: Tensor) -> Tensor:
        torch.rand(3)
        raise ValueError("in backward")

    def failing(x: Tensor) -> Tensor:
        y = x * 1
        y.register_hook(fail)
        return y

    pipeline = pipe(nn.Sequential(nn.Linear(W, W).double(), Call(failing)), mode="never")
    loss = whole_batch_loss(pipeline(rows(8)))
    before = torch.get_rng_state()

    with pytest.raises(ValueError, match="in backward"):
        loss.backward()

    assert torch.equal(torch.get_rng_state(), before)
