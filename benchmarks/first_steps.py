"""Claim: ``threads="auto"`` costs next to nothing while it finds out which way is faster.

A new pipeline of two devices runs its first ten steps: with threads, with one thread for both
devices, and by ``"auto"``, which may run some in the slower way before it knows. Each round makes
new pipelines; a step is a forward and a backward, and operators use one core each.

    python -m benchmarks.first_steps

Transformer blocks compute for milliseconds on a micro-batch: ``"auto"`` / threads must be at most
1.10. Nearly empty layers gain nothing by threads: ``"auto"`` / one thread must be at most 1.10.
Between the two, narrow blocks on short sequences, for which both ways take about as long, are for
information, beside the better of both.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.contestants.ours import ours
from benchmarks.contestants.plain import mean_square
from benchmarks.contestants.task import Task
from benchmarks.cpu_pipeline import SIZES, STAGES, transformer_task
from benchmarks.harness import Contestant, Options, Report, agree, contest, options, ratio
from benchmarks.models import transformer
from benchmarks.overhead import nearly_nothing

Threads = bool | Literal["auto"]

STEPS, AT_MOST = 10, 1.10
WAYS: dict[str, Threads] = {"threads": True, "one thread": False, "auto": "auto"}
NARROW, SHORT, WIDTH = 8, 32, 64


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    given = options(
        "first_steps", __doc__, rounds=5, argv=argv, **SIZES | {"blocks": 2, "time": 64}
    )
    report = Report(given, f"The first {STEPS} steps, {STAGES} devices, m = {given.chunks}")
    heavy = timed(given, report, "blocks", transformer_task(given))
    report.target(f"{heavy['auto']} / threads", heavy["over threads"], at_most=AT_MOST)
    tiny = timed(given, report, "nearly empty layers", nearly_nothing(STAGES, given.chunks))
    report.target(f"{tiny['auto']} / one thread", tiny["over one thread"], at_most=AT_MOST)
    torch.manual_seed(0)
    x = torch.randn(given.batch_size, SHORT, WIDTH)
    task = Task(transformer(NARROW, WIDTH), x, torch.randn_like(x), loss=mean_square)
    between = timed(given, report, "narrow blocks", task)
    best = max(between["over threads"], between["over one thread"])
    report.target(f"{between['auto']} / the better of both", best)
    report.publish()


def timed(given: Options, report: Report, title: str, task: Task) -> dict[str, Any]:
    """Both ways and ``"auto"``: the name of its row, and its time over that of each way."""
    balance = [len(task.module) // STAGES] * STAGES
    names = {way: f"{title}, {way}" for way in WAYS}
    begin = partial(beginning, task, balance, given.chunks)
    contestants = [begin(name, WAYS[way]) for way, name in names.items()]
    agree(contestants)
    times = contest(contestants, rounds=given.rounds, warm_up=1)
    report.times(times)
    over = {f"over {way}": ratio(times, names["auto"], names[way]) for way in WAYS}
    return {"auto": names["auto"], **over}


def beginning(
    task: Task, balance: list[int], chunks: int, name: str, threads: Threads
) -> Contestant:
    """The first steps of a pipeline that is made for them."""
    make = partial(
        ours,
        task,
        balance,
        chunks=chunks,
        mode="never",
        devices=["cpu"] * STAGES,
        on_threads=threads,
    )

    def step() -> float:
        with make() as pipeline:
            start = time.perf_counter()
            for _ in range(STEPS):
                pipeline.step()
            return time.perf_counter() - start

    def gradients() -> list[Tensor]:
        with make() as pipeline:
            return list(pipeline.gradients())

    return Contestant(name, step, gradients, threads=1)


if __name__ == "__main__":
    main()
