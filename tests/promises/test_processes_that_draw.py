"""Same numbers: layers draw the same numbers over processes as over threads."""

import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.library import Library

from lightning_gpipe import GPipe
from lightning_gpipe.core.schedules import ActivationCheckpointing
from tests.support.models import Call, rows
from tests.support.processes import Owners, assert_equal, processes
from tests.support.ranks import Pool

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

W = 3


def noised(gradient: Tensor) -> Tensor:
    return gradient + torch.randn_like(gradient)


class Noise(nn.Module):
    """Draws in backward."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 1
        if y.requires_grad:
            y.register_hook(noised)
        return y


class Late(nn.Module):
    """A dropout that begins at p = 0, and is there for some micro-batches of later mini-batches."""

    def __init__(self, *microbatches: int) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.0)
        self.microbatches = microbatches
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        minibatch, i = divmod(self.calls, 3)
        self.calls += 1
        self.dropout.p = 0.5 if minibatch and i in self.microbatches else 0.0
        return self.dropout(x)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "backward": Noise,
    "late": lambda: Late(0, 1, 2),
    "late, in the first micro-batch": lambda: Late(0),
    "dropout": lambda: nn.Dropout(0.5),
}


def steps(
    kind: str, at: int, mode: ActivationCheckpointing, owners: Owners | None
) -> tuple[list[Tensor], Tensor]:
    """Outputs and gradients of the input in four steps, and the next number."""
    torch.manual_seed(4)
    layers = [nn.Linear(W, W) for _ in range(3)]
    module = nn.Sequential(*layers[:at], KINDS[kind](), *layers[at:]).double()
    pipeline = GPipe(
        module,
        [2, 2],
        devices=["cpu"] * 2,
        chunks=3,
        activation_checkpointing=mode,
        **processes(owners),
    )
    found = []
    for k in range(4):
        x = rows(7, seed=k).requires_grad_()
        y = pipeline(x)
        y.square().mean().backward()
        assert x.grad is not None
        found += [y.detach(), x.grad, torch.rand(())]
    pipeline.close()
    return found, torch.rand(())


@pytest.mark.parametrize("mode", ["always", "never"])
@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_draw(
    four_ranks: Pool, kind: str, at: int, mode: ActivationCheckpointing
) -> None:
    with torch.random.fork_rng(devices=[]):
        expected = steps(kind, at, mode, None)

    for found in four_ranks.run(steps, kind, at, mode, (0, 1), among=2):
        assert_equal(found, expected)


@contextmanager
def untagged() -> Iterator[nn.Module]:
    """A layer that draws by an operator that is not tagged as one."""
    library = Library("gpipe_processes", "DEF")
    library.define("untagged(Tensor x) -> Tensor")
    library.impl(
        "untagged", lambda x: x * torch.rand(x.shape, dtype=x.dtype), "CompositeExplicitAutograd"
    )
    yield Call(lambda x: x * torch.ops.gpipe_processes.untagged(torch.ones_like(x)))
    library._destroy()


@contextmanager
def drawing(draw: Callable[[], Any]) -> Iterator[nn.Module]:
    yield Call(lambda x: x * draw())


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "untagged": (untagged, "untagged"),
    "random": (lambda: drawing(lambda: random.random()), "over processes.*random drew"),
    "numpy": (lambda: drawing(lambda: np.random.rand()), "over processes.*numpy.random drew"),
}


def refused(
    kind: str, at: int, mode: ActivationCheckpointing, *, by_step: bool = False
) -> tuple[str, Any]:
    """What a step says, and what is drawn after it."""
    torch.manual_seed(4)
    random.seed(1)
    np.random.seed(1)
    make, _ = REFUSED[kind]
    with make() as layer:
        layers = [nn.Linear(W, W) for _ in range(3)]
        module = nn.Sequential(*layers[:at], layer, *layers[at:]).double()
        options = processes((0, 1))
        pipeline = GPipe(
            module,
            [2, 2],
            devices=["cpu"] * 2,
            chunks=3,
            activation_checkpointing=mode,
            **options,
        )
        message = "none"
        try:
            if by_step:
                pipeline.by_micro_batch(lambda x: pipeline(x).square().mean(), rows(7))
            else:
                pipeline(rows(7)).square().mean().backward()
        except RuntimeError as error:
            message = str(error)
        pipeline.close()
    return message, (torch.rand(()), random.random(), np.random.rand())


@pytest.mark.parametrize("by_step", [False, True])
@pytest.mark.parametrize("mode", ["always", "never"])
@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("kind", ["random", "numpy"])
def test_draw_from_the_generator_of_a_library_is_refused_in_all_processes(
    four_ranks: Pool, kind: str, at: int, mode: ActivationCheckpointing, by_step: bool
) -> None:
    """It would leave that generator in another state than in the other processes."""
    found = four_ranks.run(partial(refused, by_step=by_step), kind, at, mode, among=2)

    pattern = REFUSED[kind][1]
    assert all(re.search(pattern, message) for message, _ in found), found
    assert_equal(found[0][1], found[1][1])


@pytest.mark.parametrize("at", [0, 3])
def test_untagged_operator_that_is_recomputed_is_refused(four_ranks: Pool, at: int) -> None:
    found = four_ranks.run(refused, "untagged", at, "always", among=2)

    assert "got gpipe_processes::untagged, untagged" in found[at > 0][0]
    assert "operators that draw random numbers must be tagged" in found[at == 0][0]
    assert_equal(found[0][1], found[1][1])


class Failing(nn.Module):
    """Raises an error in its second mini-batch, in which layers draw for the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 5:
            raise ValueError("burnt")
        return x


def fail(
    mode: ActivationCheckpointing, owners: Owners | None
) -> tuple[list[str], list[Any], Tensor]:
    """What two steps say, of which the second fails; what came of two more; the next number."""
    torch.manual_seed(4)
    module = nn.Sequential(Late(), nn.Linear(W, W), nn.Linear(W, W), Failing()).double()
    pipeline = GPipe(
        module,
        [2, 2],
        devices=["cpu"] * 2,
        chunks=3,
        activation_checkpointing=mode,
        **processes(owners),
    )
    said, found = [], []
    for _ in range(2):
        try:
            pipeline(rows(7)).square().mean().backward()
            said.append("none")
        except (ValueError, RuntimeError) as error:
            said.append(str(error))
    for k in range(2):
        x = rows(7, seed=k).requires_grad_()
        y = pipeline(x)
        y.square().mean().backward()
        found.append((y.detach(), x.grad))
    pipeline.close()
    return said, found, torch.rand(())


@pytest.mark.parametrize("mode", ["always", "never"])
def test_error_where_one_process_has_drawn_already_and_the_next_steps_work(
    four_ranks: Pool, mode: ActivationCheckpointing
) -> None:
    with torch.random.fork_rng(devices=[]):
        _, expected, number = fail(mode, None)

    found = four_ranks.run(fail, mode, (0, 1), among=2)

    for said, steps, other in found:
        assert said[0] == "none"
        assert "burnt" in said[1]
        assert_equal((steps, other), (expected, number))
