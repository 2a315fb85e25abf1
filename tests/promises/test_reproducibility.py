"""Same numbers: under a seed, random numbers do not depend on the timing of threads."""

import random
import time
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe.core.pipeline import GPipe
from tests.support.models import Call, gradients, rows, whole_batch_loss
from tests.support.pipes import MODES, Pipe

pytestmark = pytest.mark.usefixtures("own_generator")

W, N, CHUNKS = 3, 3, 4
TIMES = 50
UNEVEN = random.Random()  # not the generator of Python's random, whose draws a pipeline notices


def attention(x: Tensor) -> Tensor:
    q = x.unflatten(0, (1, 1, -1))
    return x + nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5).flatten(0, 2)


# Operators that take a generator, and some that draw from the default one only.
DRAWS: dict[str, Callable[[], nn.Module]] = {
    "dropout": nn.Dropout,
    "dropout in attention": lambda: Call(attention),
    "noise": lambda: Call(lambda x: x + torch.randn_like(x)),
}


def dawdle(x: Tensor) -> Tensor:
    """Takes some time that is never the same."""
    time.sleep(UNEVEN.uniform(0.0, 0.001))
    return x


def drawing(draw: Callable[[], nn.Module]) -> nn.Sequential:
    """Stages of four layers that all draw, now sooner, now later."""
    torch.manual_seed(1)
    stage = [lambda: nn.Linear(W, W), lambda: Call(dawdle), draw, nn.Tanh]
    return nn.Sequential(*(make() for make in stage * N)).double()


def seeded_step(pipeline: GPipe) -> dict[str, Tensor]:
    """All that a step gives under one seed."""
    torch.manual_seed(5)
    pipeline.zero_grad()
    x = rows(8)
    output = pipeline(x)
    between = torch.get_rng_state()
    whole_batch_loss(output).backward()
    assert x.grad is not None
    states = {"state between": between, "state after": torch.get_rng_state()}
    return {"output": output, "x": x.grad, **gradients(pipeline), **states}


def different(steps: Sequence[dict[str, Tensor]]) -> list[tuple[int, str]]:
    """Which of the steps differ from the first, and where. All sums are taken in one order."""
    return [
        (k, name)
        for k, each in enumerate(steps)
        for name in steps[0]
        if not torch.equal(each[name], steps[0][name])
    ]


each_draw = pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)


@each_draw
def test_step_repeated(draw: Callable[[], nn.Module], pipe: Pipe) -> None:
    pipeline = pipe(drawing(draw), stages=N, chunks=CHUNKS)

    steps = [seeded_step(pipeline) for _ in range(TIMES)]

    assert different(steps) == []
    assert torch.equal(steps[0]["state between"], steps[0]["state after"])
    torch.manual_seed(6)
    assert not torch.equal(pipeline(rows(8)), steps[0]["output"])


@each_draw
def test_first_step_repeated(draw: Callable[[], nn.Module], pipe: Pipe) -> None:
    steps = [
        seeded_step(pipe(drawing(draw), stages=N, chunks=CHUNKS, mode=mode, threads=threads))
        for mode in MODES
        for threads in (True, True, False)
    ]

    assert different(steps) == []


@each_draw
def test_forward_without_gradients_repeated(draw: Callable[[], nn.Module], pipe: Pipe) -> None:
    pipeline = pipe(drawing(draw), stages=N, chunks=CHUNKS)
    forwards = []

    for _ in range(TIMES):
        torch.manual_seed(5)
        with torch.no_grad():
            output = pipeline(rows(8))
        forwards.append({"output": output, "state": torch.get_rng_state()})

    assert different(forwards) == []


@each_draw
def test_seed_goes_on_from_step_to_step(draw: Callable[[], nn.Module], pipe: Pipe) -> None:
    pipeline = pipe(drawing(draw), stages=N, chunks=CHUNKS)
    runs = []

    for _ in range(5):
        torch.manual_seed(5)
        outputs = {str(k): pipeline(rows(8)).detach() for k in range(3)}
        runs.append({**outputs, "state": torch.get_rng_state()})

    assert different(runs) == []
    assert not torch.equal(runs[0]["0"], runs[0]["1"])
    assert not torch.equal(runs[0]["1"], runs[0]["2"])
