"""One thread for all stages: one backward computes the gradients of all micro-batches of a stage.

They are those of a backward for each micro-batch, which threads run, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from lightning_gpipe import GPipe
from lightning_gpipe.core.run.backward import roots
from lightning_gpipe.core.schedules import Kind
from lightning_gpipe.skip import pop, skippable, stash
from tests.support.drawn import pipe as pipe_drawn
from tests.support.faults import OwnError
from tests.support.grammar import Case, cases, models
from tests.support.pipes import Pipe
from tests.support.processes import assert_equal

M, WIDTH = 5, 8
Calls = list[int]  # the roots of each call of autograd's engine by the pipeline


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Notes the calls of autograd's engine that are not the caller's."""
    found: Calls = []

    def counted(starts: Any, *args: Any, **options: Any) -> Any:
        found.append(len(starts))
        return _engine_run_backward(starts, *args, **options)

    monkeypatch.setattr(roots, "_engine_run_backward", counted)
    return found


class Twice(nn.Linear):
    """Uses its weight twice."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x).relu())


class Embedded(nn.Embedding):
    """Adds a vector of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(torch.zeros(len(x), dtype=torch.long))


class Kept(nn.Linear):
    """Computes a tensor from its weight in the first of several forwards."""

    times, transposed = 0, torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        if self.times % M == 0:
            self.transposed = self.weight.double().sum(0, keepdim=True).expand(WIDTH, -1).float()
        self.times += 1
        return linear(x, self.weight.detach()) * self.transposed[0]


class Captured(nn.Module):
    """Uses a tensor that it is not given, and that requires a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.outside = [torch.ones(WIDTH, requires_grad=True)]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.outside[0].exp()


class Deep(nn.Sequential):
    """A graph of many nodes."""

    def __init__(self) -> None:
        super().__init__(*(nn.Tanh() for _ in range(13)))


class Checkpointed(nn.Linear):
    """Runs a backward of its own within backward."""

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(super().forward, x, use_reentrant=True)
        assert isinstance(y, Tensor)
        return y


class Noisy(nn.Linear):
    """Draws in backward."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient + torch.rand_like(gradient))
        return y


@skippable(stash=["x"])
class Enter(nn.Module):
    """Begins a skip connection."""

    def forward(self, x: Tensor) -> Generator[Any, Any, Any]:
        yield stash("x", x)
        return 2 * x


@skippable(pop=["x"])
class Leave(nn.Module):
    """Ends a skip connection."""

    def forward(self, x: Tensor) -> Generator[Any, Any, Any]:
        before = yield pop("x")
        return x + before


def gradients(pipeline: GPipe, autocast: bool = False) -> list[Tensor | None]:
    """Those of a step, after some others."""
    x = torch.empty(0)
    for _ in range(4):
        torch.manual_seed(1)
        pipeline.zero_grad()
        x = torch.randn(2 * M, WIDTH, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            output = pipeline(x)
        output.float().square().mean().backward()
    return [x.grad, *(parameter.grad for parameter in pipeline.parameters())]


def stages(*middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *middle, nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize(
    "middle, at_once",
    [
        (lambda: nn.Tanh(), True),
        (lambda: nn.Linear(WIDTH, WIDTH, bias=False), True),
        (lambda: Embedded(1, WIDTH), True),
        (lambda: nn.Dropout(0.5), True),
        (lambda: Twice(WIDTH, WIDTH), False),
        (lambda: Kept(WIDTH, WIDTH), False),
        (lambda: Captured(), False),
        (lambda: Deep(), False),
        (lambda: Checkpointed(WIDTH, WIDTH), False),
    ],
    ids=[
        *("plain", "weight", "embedding", "dropout"),
        *("twice", "kept", "captured", "deep", "checkpoint"),
    ],
)
def test_same_to_the_bit(
    pipe: Pipe, calls: Calls, middle: Callable[[], nn.Module], at_once: bool
) -> None:
    torch.manual_seed(0)
    model = stages(middle())
    expected = gradients(pipe(model, [1, 1, 1], chunks=M, mode="never"))
    calls.clear()

    found = gradients(pipe(model, [1, 1, 1], chunks=M, mode="never", threads=False))

    assert_equal(found, expected)
    if at_once:
        assert calls[-3:] == [M] * 3
    else:
        assert calls[-M - 1 :] == [*[1] * M, M]


def test_skip_connections(pipe: Pipe, calls: Calls) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Enter(), nn.Linear(WIDTH, WIDTH), Leave())
    expected = gradients(pipe(model, [1, 1, 1], chunks=M, mode="never"))
    calls.clear()

    found = gradients(pipe(model, [1, 1, 1], chunks=M, mode="never", threads=False))

    assert_equal(found, expected)
    assert calls[-3:] == [M, M, 2 * M]


def test_weights_that_autocast_has_cast_once_for_all(pipe: Pipe) -> None:
    """Their gradients would be added up in low precision."""
    model = stages(nn.Linear(WIDTH, WIDTH))
    expected = gradients(pipe(model, [1, 2], chunks=M, mode="never"), autocast=True)

    found = gradients(pipe(model, [1, 2], chunks=M, mode="never", threads=False), autocast=True)

    assert_equal(found, expected)


def test_layer_that_draws_in_backward(pipe: Pipe, calls: Calls) -> None:
    model = stages(Noisy(WIDTH, WIDTH))
    expected = gradients(pipe(model, [1, 2], chunks=M, mode="never"))
    calls.clear()

    found = gradients(pipe(model, [1, 2], chunks=M, mode="never", threads=False))

    assert_equal(found, expected)
    assert calls[-2 * M :] == [1] * (2 * M)


def test_recomputation_is_one_by_one(pipe: Pipe, calls: Calls) -> None:
    gradients(pipe(stages(), [1, 1], chunks=M, mode="always", threads=False))

    assert calls[-2 * M :] == [1] * (2 * M)


def test_profiler_shows_each_backward(pipe: Pipe, calls: Calls) -> None:
    pipeline = pipe(stages(), [1, 1], chunks=M, mode="never", threads=False)
    gradients(pipeline)
    calls.clear()

    with torch.profiler.profile() as profiled:
        gradients(pipeline)

    assert {*calls} == {1}
    names = {event.key for event in profiled.key_averages()}
    assert names.issuperset(f"stage {j} backward {i}" for j in range(2) for i in range(M))


@settings(max_examples=settings().max_examples // 2)  # each runs two pipelines
@given(case=cases(models()))
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.filterwarnings("ignore:an output of layers should have a row per sample")
@pytest.mark.usefixtures("one_intra_op_thread")
def test_drawn_models(case: Case) -> None:
    threads, inline = (
        pipe_drawn(each, each.build())
        for each in (replace(case, threads=True), replace(case, threads=False))
    )

    assert_equal([each._asdict() for each in inline], [each._asdict() for each in threads])


def test_times_are_shared_out(pipe: Pipe) -> None:
    pipeline = pipe(stages(), [1, 1], chunks=M, mode="never", threads=False)

    gradients(pipeline)

    assert pipeline.timeline is not None
    spans = [each for each in pipeline.timeline.spans if each.action.kind is Kind.BACKWARD]
    assert [each.action.j for each in spans] == [1] * M + [0] * M
    assert [each.action.i for each in spans] == [*reversed(range(M))] * 2
    lengths = [each.end - each.start for each in spans[:M]]
    assert lengths == pytest.approx([lengths[0]] * M, rel=1e-3)


class Failing(nn.Identity):
    """Fails in backward, once that is wanted."""

    fails = False

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        if y.requires_grad:
            y.register_hook(self.fail)
        return y

    def fail(self, _: Tensor) -> None:
        if self.fails:
            raise OwnError


def test_error_says_that_all_ran_at_once(pipe: Pipe) -> None:
    pipeline = pipe(stages(Failing()), [1, 2], chunks=M, mode="never", threads=False)
    gradients(pipeline)
    next(each for each in pipeline.modules() if isinstance(each, Failing)).fails = True

    with pytest.raises(OwnError) as raised:
        gradients(pipeline)

    [note] = raised.value.__notes__
    assert note == (
        f"raised in backward of all {M} micro-batches, which autograd computes at once, on stage 1 "
        "(layers 1..2, cpu), in layer 1 (Failing)"
    )
