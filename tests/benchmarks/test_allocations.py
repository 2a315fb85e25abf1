"""Peaks of allocations that are known."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.harness.allocations import Counting, peak_bytes

MIB = 2**20


def mebibytes(number: int) -> torch.Tensor:
    return torch.empty(number * MIB, dtype=torch.uint8)


def test_peak_of_one_thread() -> None:
    def step() -> None:
        first = mebibytes(3)
        del first
        second, third = mebibytes(2), mebibytes(2)
        del second, third

    assert peak_bytes(step) == 4 * MIB


def test_what_was_there_before_does_not_count() -> None:
    kept: list[torch.Tensor] = []

    def step() -> None:
        kept.append(mebibytes(1))
        kept.append(mebibytes(2))

    assert peak_bytes(step, clear=kept.clear) == 3 * MIB
    assert len(kept) == 2


def test_step_that_frees_before_it_allocates() -> None:
    kept = [mebibytes(5)]

    def step() -> None:
        kept.clear()
        kept.append(mebibytes(5))

    assert peak_bytes(step) == 0


class Hold(nn.Module):
    """Has so many MiB until all others have theirs."""

    def __init__(self, size: int, barrier: threading.Barrier) -> None:
        super().__init__()
        self.size = size
        self.barrier = barrier

    def forward(self) -> None:
        held = mebibytes(self.size)
        self.barrier.wait()
        del held
        self.barrier.wait()
        mebibytes(self.size)


def test_threads_that_allocate_at_the_same_time() -> None:
    def step() -> None:
        barrier = threading.Barrier(4)
        layers = [Hold(size, barrier) for size in (1, 2, 4)]
        threads = [threading.Thread(target=layer) for layer in layers]
        for thread in threads:
            thread.start()
        Hold(8, barrier)()
        for thread in threads:
            thread.join()

    assert peak_bytes(step) == 15 * MIB


def test_thread_that_lives_on_between_steps() -> None:
    layer = Hold(3, threading.Barrier(1))

    with ThreadPoolExecutor(1) as worker:
        assert peak_bytes(lambda: worker.submit(layer).result()) == 3 * MIB
        with pytest.raises(RuntimeError, match="measure a new pipeline"):
            peak_bytes(lambda: worker.submit(layer).result())


def test_what_others_print_is_not_swallowed(capfd: pytest.CaptureFixture[str]) -> None:
    def step() -> None:
        os.write(2, b"from a step\n")

    peak_bytes(step)

    assert capfd.readouterr().err.count("from a step") == 2


def test_counting_of_fake_tensors() -> None:
    with FakeTensorMode():
        layers = nn.Sequential(nn.Linear(1000, 1000, bias=False), nn.ReLU())
        x = torch.empty(500, 1000)
        with Counting([*layers.parameters(), x]) as counting:
            y = layers(x)
            assert counting.now == 4 * (1000 * 1000 + 2 * 500 * 1000)
            del y

    assert counting.now == 4 * (1000 * 1000 + 500 * 1000)
    assert counting.peak == 4 * (1000 * 1000 + 3 * 500 * 1000)


def test_counting_is_what_is_measured_of_tensors_with_memory() -> None:
    layers = nn.Sequential(
        nn.PReLU(), nn.Tanh(), nn.PReLU()
    )  # their kernels need no scratch memory
    x = torch.randn(1024, 64)

    def step() -> None:
        layers(x).sum().backward()

    measured = peak_bytes(step, clear=layers.zero_grad)
    layers.zero_grad()
    with Counting([x, *layers.parameters()]) as counting:
        before = counting.now
        step()

    assert counting.peak - before == pytest.approx(measured, rel=0.02)
