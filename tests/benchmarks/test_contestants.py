"""Every contestant does the step that the others do; what ends badly says so, and ends."""

import multiprocessing
import sys
import threading
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from benchmarks.contestants.fairscale import fairscale
from benchmarks.contestants.offloaded import offloaded
from benchmarks.contestants.ours import ours, ours_in_processes
from benchmarks.contestants.pipelining import pipelining
from benchmarks.contestants.plain import accumulated, mean_square, plain
from benchmarks.contestants.task import Task
from benchmarks.harness import Contestant, Times, agree, contest, in_one

SHARED: dict[str, Any] = {"chunks": 3, "mode": "always", "devices": ["cpu", "cpu"]}


def words() -> Task:
    """Two layers on six words; the first layer knows five."""
    torch.manual_seed(0)
    x = torch.tensor([0, 1, 2, 3, 1, 4])
    return Task(
        nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2)), x, torch.randn(6, 2), mean_square
    )


def processes_of_stages() -> list[BaseProcess]:
    return [each for each in multiprocessing.active_children() if "benchmark-rank" in each.name]


def names() -> set[str]:
    return {process.name for process in processes_of_stages()}


def test_several_contests_in_one() -> None:
    order = list[float]()

    def contestant(name: str, seconds: float) -> Contestant:
        def step() -> float:
            order.append(seconds)
            return seconds

        return Contestant(name, step, list)

    contestants = [contestant("one", 1.0), contestant("two", 2.0)]
    contests = list[dict[str, Times]]()

    def times(seed: int) -> list[float]:
        order.clear()
        contests.append(contest(contestants, rounds=8, warm_up=0, seed=seed))
        return [*order]

    assert times(1) == times(1) != times(2)
    assert {k: v.seconds for k, v in in_one(contests).items()} == {
        "one": (1.0,) * 24,
        "two": (2.0,) * 24,
    }


def test_one_process_or_thread_or_none() -> None:
    task = words()

    with ours(task, [1, 1], **SHARED) as pipelined:
        agree([plain(task), accumulated(task, chunks=3), pipelined])


def test_offloaded() -> None:
    task = words()

    with offloaded(task, chunks=3, device="cpu", name="FSDP2") as theirs:
        agree([plain(task), theirs])
        agree([plain(task), theirs])


def test_pipelining() -> None:
    task = words()

    with pipelining(task, [1, 1], chunks=3, schedule=Schedule1F1B, untimed=1) as processes:
        agree([plain(task), processes])
        assert {"benchmark-rank-0", "benchmark-rank-1"} <= names()
        (times,) = contest([processes], rounds=2, warm_up=0).values()

        agree([plain(task), processes])  # gradients do not add up from step to step
        assert len(times.seconds) == 2

    assert not names()


@pytest.mark.parametrize(
    "schedule, ranks",
    [(ScheduleInterleaved1F1B, (0, 1, 0, 1)), (ScheduleZBVZeroBubble, (0, 1, 1, 0))],
)
def test_two_stages_in_each_process(schedule: Any, ranks: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(3, 3, bias=k > 1) for k in range(4)))
    task = Task(layers, torch.randn(8, 3), torch.randn(8, 3), mean_square)

    shared: dict[str, Any] = {"chunks": 4, "schedule": schedule, "ranks": ranks}
    with pipelining(task, [1] * 4, **shared) as processes:
        agree([plain(task), processes])


def test_ours_in_processes() -> None:
    task = words()
    shared: dict[str, Any] = {"chunks": 3, "mode": "never", "owners": [0, 1], "name": "ours"}

    with ours_in_processes(task, [1, 1], **shared) as processes:
        agree([plain(task), processes])

    assert not names()


def test_error_in_a_process_reaches_the_caller() -> None:
    task = words()
    task.x[-1] = 5  # in the last micro-batch

    with pytest.raises(RuntimeError) as raised, pipelining(task, [1, 1], chunks=3) as processes:
        processes.step()

    assert "benchmark-rank-0 failed" in str(raised.value)
    assert "IndexError: index out of range" in str(raised.value)
    assert not names()


def test_process_that_is_gone() -> None:
    task = words()

    with pipelining(task, [1, 1], chunks=3) as processes:
        for process in processes_of_stages():
            process.kill()
            process.join()

        with pytest.raises(RuntimeError, match="benchmark-rank-. ended without an answer"):
            processes.step()

    assert not names()


def test_fairscale_leaves_no_thread() -> None:
    pytest.importorskip("fairscale")
    task, before = words(), set(threading.enumerate())

    with fairscale(task, [1, 1], **SHARED) as theirs:
        agree([plain(task), theirs])
        [worker] = set(threading.enumerate()) - before

    worker.join(10)
    assert not worker.is_alive()


def test_fairscale_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fairscale", "fairscale.nn"):
        monkeypatch.setitem(sys.modules, name, None)

    with fairscale(words(), [1, 1], **SHARED, name="theirs") as theirs:
        assert (theirs.name, theirs.installed) == ("theirs", False)
