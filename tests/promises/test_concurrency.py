"""No hang: several threads of the user may share a pipeline."""

import threading
import time
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import Function

from lightning_gpipe.core.pipeline import GPipe
from lightning_gpipe.core.run.guards.lost_gradients import LostGradients
from lightning_gpipe.core.run.micro_batch_losses.user_step import UserStep
from tests.support.models import (
    Call,
    Step,
    assert_same,
    assert_same_step,
    gradients,
    perceptron,
    rows,
    step,
)
from tests.support.pipes import Pipe, every_mode, with_and_without_threads
from tests.support.waiting import PATIENCE


def slowly(x: Tensor) -> Tensor:
    time.sleep(0.002)
    return x


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("gradients", [True, False])
def test_two_threads_take_turns(devices: int, gradients: bool, pipe: Pipe) -> None:
    """Once one thread took the other's shadow parameters for the real ones, and left them there."""
    plain = nn.Sequential(*perceptron(2), Call(slowly), *perceptron(2))
    pipeline = pipe(plain, devices=devices)
    parameters = list(pipeline.parameters())
    outputs: list[Tensor] = []

    def run() -> None:
        for _ in range(5):
            if gradients:
                pipeline(rows(7)).sum().backward()
            with torch.no_grad():
                outputs.append(pipeline(rows(7)))

    threads = [threading.Thread(target=run, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads)

    assert all(one is two for one, two in zip(pipeline.parameters(), parameters, strict=True))
    for output in outputs:
        assert_same(output, plain(rows(7)).detach())
    pipeline.zero_grad()
    assert_same_step(pipeline, plain, rows(7))


@with_and_without_threads
def test_steps_by_micro_batch_take_turns(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the step of one thread was taken for the other's if both began at the same time."""
    pipeline = pipe(perceptron(), mode="never")
    expected = pipeline(rows(7)).mean().detach()
    begin, losses = UserStep.__init__, []

    def begin_slowly(self: UserStep, *args: Any) -> None:
        begin(self, *args)
        time.sleep(0.05)

    def run() -> None:
        outcome = pipeline.by_micro_batch(lambda x: pipeline(x).mean(), rows(7))
        losses.append(outcome.loss)

    monkeypatch.setattr(UserStep, "__init__", begin_slowly)
    threads = [threading.Thread(target=run, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)

    assert len(losses) == 3
    for loss in losses:
        assert_same(loss, expected)


@every_mode
@pytest.mark.parametrize("devices", [(1, 1), (2, 1), (2, 2)], ids=str)
def test_pipelines_of_the_same_layers_take_turns(devices: tuple[int, int], pipe: Pipe) -> None:
    """Once each undid its changes to what it had seen: shadows of the other stayed for good."""
    plain = nn.Sequential(*perceptron(2), Call(slowly), *perceptron(2))
    layers = deepcopy(plain)
    pipelines = [pipe(layers, devices=each, copy=False) for each in devices]
    parameters = list(layers.parameters())
    steps, errors = 10, list[BaseException]()

    def run(pipeline: GPipe) -> None:
        try:
            for _ in range(steps):
                pipeline(rows(7)).exp().sum().backward()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(each,), daemon=True) for each in pipelines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads)

    assert errors == []
    assert all(one is two for one, two in zip(layers.parameters(), parameters, strict=True))
    (plain(rows(7)).exp().sum() * 2 * steps).backward()
    assert_same(gradients(layers), gradients(plain))


def test_pipelines_that_share_some_layers_take_turns(pipe: Pipe) -> None:
    """They take the turns of all modules in one order, so that none waits for the other."""
    first, shared, last = (nn.Sequential(*perceptron(2), Call(slowly)) for _ in range(3))
    separate = [pipe(nn.Sequential(each, nn.Tanh()), copy=False) for each in (first, last)]
    joined = [
        pipe(nn.Sequential(first, shared, last), [1, 2], copy=False),
        pipe(nn.Sequential(last, shared, first), [1, 2], copy=False),
    ]
    parameters = [p for each in (first, shared, last) for p in each.parameters()]

    def run(pipeline: GPipe) -> None:
        for _ in range(5):
            pipeline(rows(7)).exp().sum().backward()

    threads = [
        threading.Thread(target=run, args=(each,), daemon=True) for each in (*separate, *joined)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)

    assert not any(thread.is_alive() for thread in threads)
    after = [p for each in (first, shared, last) for p in each.parameters()]
    assert all(one is two for one, two in zip(after, parameters, strict=True))


class Waits(Function):
    """The identity, whose backward waits for another thread."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, begun: threading.Event, seen: threading.Event) -> Tensor:
        ctx.begun, ctx.seen = begun, seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.begun.set()
        ctx.seen.wait(0.1)
        return gradients[0], None, None


@with_and_without_threads
def test_forward_while_another_thread_runs_a_backward(pipe: Pipe) -> None:
    """Once it took the gradients on their way for those that no backward takes."""
    begun, seen = threading.Event(), threading.Event()
    plain = nn.Sequential(
        nn.Linear(3, 3), Call(lambda x: Waits.apply(x, begun, seen)), nn.Linear(3, 3)
    ).double()
    pipeline = pipe(plain, [2, 1])
    loss = pipeline(rows(7)).sum()
    other = threading.Thread(target=loss.backward, daemon=True)
    other.start()
    assert begun.wait(PATIENCE)

    output = pipeline(rows(7))
    seen.set()
    other.join(PATIENCE)
    assert not other.is_alive()

    assert_same(output.detach(), plain(rows(7)).detach())
    plain(rows(7)).sum().backward()
    assert_same(gradients(pipeline), gradients(plain))


@with_and_without_threads
def test_backward_while_another_thread_begins_a_forward(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward looks for gradients that no backward takes, so none may run meanwhile."""
    looking, begun, seen = threading.Event(), threading.Event(), threading.Event()
    seen.set()
    layers = [nn.Linear(3, 3), Call(lambda x: Waits.apply(x, begun, seen)), nn.Linear(3, 3)]
    pipeline = pipe(nn.Sequential(*layers).double(), [2, 1], copy=False)
    loss = pipeline(rows(7)).sum()
    ran_meanwhile: list[bool] = []
    look = LostGradients.check

    def check(self: LostGradients) -> None:
        if not looking.is_set():
            looking.set()
            ran_meanwhile.append(begun.wait(0.2))
        look(self)

    monkeypatch.setattr(LostGradients, "check", check)
    other = threading.Thread(target=pipeline, args=(rows(7),), daemon=True)
    other.start()
    assert looking.wait(PATIENCE)
    loss.backward()
    other.join(PATIENCE)

    assert not other.is_alive()
    assert ran_meanwhile == [False]
    assert begun.is_set()


@every_mode
@with_and_without_threads
def test_backward_while_another_thread_runs_a_forward(pipe: Pipe) -> None:
    """It begins by undoing what an interrupt may have left, as if no layer was running."""
    begun, leave = threading.Event(), threading.Event()
    leave.set()
    unchanged: list[bool] = []

    def wait(x: Tensor) -> Tensor:
        weight = linear.weight
        begun.set()
        assert leave.wait(PATIENCE)
        unchanged.append(linear.weight is weight)
        return x

    linear = nn.Linear(3, 3).double()
    pipeline = pipe(nn.Sequential(Call(wait), linear, *perceptron(2)), [2, 2], copy=False)
    loss = pipeline(rows(7)).sum()
    leave.clear()
    begun.clear()

    forward = threading.Thread(target=pipeline, args=(rows(7),), daemon=True)
    backward = threading.Thread(target=loss.backward, daemon=True)
    forward.start()
    assert begun.wait(PATIENCE)
    backward.start()
    backward.join(0.1)  # as it must wait for the forward, it is not over by then
    leave.set()
    for thread in (forward, backward):
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert all(unchanged)


def test_error_of_one_thread_is_not_the_others(pipe: Pipe) -> None:
    """Once the thread that waited for its turn took the other's error, and both hung."""
    started, asked = threading.Event(), threading.Event()
    ends: dict[str, BaseException | Step] = {}

    def fail_once(x: Tensor) -> Tensor:
        if not started.is_set():
            started.set()
            asked.wait(PATIENCE)
            time.sleep(0.1)  # by then the other thread waits
            raise ValueError("once")
        return x

    plain = nn.Sequential(*perceptron(2), Call(fail_once), *perceptron(2))
    pipeline = pipe(plain)

    def run(name: str) -> None:
        try:
            ends[name] = step(pipeline, rows(7))
        except BaseException as error:
            ends[name] = error

    first = threading.Thread(target=run, args=("first",), daemon=True)
    first.start()
    assert started.wait(PATIENCE)
    asked.set()
    run("second")
    first.join(PATIENCE)

    assert isinstance(ends["first"], ValueError)
    second = ends["second"]
    assert isinstance(second, Step)
    assert_same(second._asdict(), step(plain, rows(7))._asdict())
