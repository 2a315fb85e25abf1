"""The benchmark runs; what it measures is not for a test to judge."""

import time

import pytest
import torch

from benchmarks.contestants.plain import mean_square
from benchmarks.contestants.task import Task
from benchmarks.cpu_pipeline import LIMIT, limit, main
from benchmarks.harness import contest

SMALL = ["--blocks=2", "--width=64", "--time=8", "--batch-size=4", "--chunks=2", "--rounds=1"]


def test_small_run_prints_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    main(SMALL)

    report = capsys.readouterr().out
    for row in ("plain, one thread", LIMIT, "pipeline, never", "limit / pipeline, never"):
        assert row in report


class Sleep(torch.nn.Module):
    """A layer that takes a known time."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert torch.get_num_threads() == 1
        time.sleep(0.05)
        return x * self.weight


def test_limit_has_no_dependency_and_a_bubble() -> None:
    layers = torch.nn.Sequential(Sleep(), Sleep())
    task = Task(layers, torch.ones(4, 1), torch.ones(4, 1), mean_square)

    times = contest([limit(task, [1, 1], chunks=4)], rounds=1, warm_up=0)

    # Four micro-batches, one after another in each half, and both halves at once: 0.2 s, times 5/4.
    # One after another would be 0.4 s, times 5/4.
    assert times[LIMIT].median >= 0.25
