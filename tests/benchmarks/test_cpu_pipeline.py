"""The benchmark runs; what it measures is not for a test to judge."""

import threading
import time

import pytest
import torch

from benchmarks.contestants.plain import mean_square
from benchmarks.contestants.task import Task
from benchmarks.cpu_pipeline import LIMIT, limit, main
from benchmarks.harness import contest
from tests.support.waiting import PATIENCE

SMALL = ["--blocks=2", "--width=64", "--time=8", "--batch-size=4", "--chunks=2", "--rounds=1"]


def test_small_run_prints_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    main(SMALL)

    report = capsys.readouterr().out
    for row in ("plain, one thread", LIMIT, "pipeline, never", "limit / pipeline, never"):
        assert row in report


class Sleep(torch.nn.Module):
    """A layer that takes a known time, beside that of the other half."""

    both = threading.Barrier(2, timeout=PATIENCE)  # of the class, as a barrier has no copies

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert torch.get_num_threads() == 1
        self.both.wait()
        time.sleep(0.05)
        return x * self.weight


def test_limit_has_no_dependency_and_a_bubble() -> None:
    layers = torch.nn.Sequential(Sleep(), Sleep())
    task = Task(layers, torch.ones(4, 1), torch.ones(4, 1), mean_square)

    times = contest([limit(task, [1, 1], chunks=4)], rounds=1, warm_up=0)

    # Four micro-batches, one after another in each half, and both halves at once: 0.2 s, times 5/4.
    # The halves one after another would not get past the barrier.
    assert times[LIMIT].median >= 0.25
