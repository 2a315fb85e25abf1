"""Promise: no hang, and nothing silent, when several threads of the user share a pipeline."""

import threading
import time

import pytest
import torch
from torch import Tensor, nn

from tests.support.models import (
    Call,
    Step,
    assert_same,
    assert_same_step,
    perceptron,
    rows,
    step,
)
from tests.support.pipes import Pipe
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
