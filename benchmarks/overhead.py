"""Claim: a micro-batch costs the pipeline little beside what its layers compute.

With nearly empty layers, the time is that of what the engine does around them: transfers, cutting
the graph, calling backward. Four stages and 32 micro-batches of one row of eight numbers. The
overhead is the time of a step, forward and backward, beyond that of the same layers on the same
micro-batches without an engine; the table has both per (stage, micro-batch) pair. The ratios of the
whole times are for information: they include the layers' own time on both sides. With
recomputation, the second run of the layers counts as overhead of both.

    python -m benchmarks.overhead

Ours is measured with four worker threads; with ``threads="auto"``, which tries those and one thread
for all four devices; and with all stages on one device. Then by ``"auto"`` with two stages, beside
ScheduleGPipe of torch.distributed.pipelining with two processes, which does not recompute. Its time
is taken within the processes, from when the first begins until the last is done, and after two
steps that are not timed: caches are warm for it, but not for ours.

At last, what a loss for each micro-batch adds: ours under 1F1B beside fill-drain, on four threads
and on one device. Its overhead is that beyond the same layers with a loss and a backward for each
micro-batch; the caller's code is a coroutine for each of them.
"""

from __future__ import annotations

from contextlib import ExitStack
from itertools import product

import torch
from torch import Tensor, nn

from benchmarks.contestants.ours import ours
from benchmarks.contestants.pipelining import pipelining
from benchmarks.contestants.plain import accumulated, mean_square
from benchmarks.contestants.task import Task
from benchmarks.contestants.torchgpipe import torchgpipe
from benchmarks.harness import Contestant, Options, Report, Times, agree, contest, options, ratio
from lightning_gpipe.core.schedules import ByMicroBatch

WIDTH = 8
AT_MOST = {"never": (0.40, 0.30), "always": (0.30, 0.30)}  # with threads, and by "auto"
PROCESSES, AT_MOST_OF_PROCESSES = 2, 0.20


class Scale(nn.Module):
    """A layer that is hardly there."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, WIDTH) to the same shape."""
        return x * self.weight


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    given = options("overhead", __doc__, rounds=40, argv=argv, stages=4, chunks=32)
    report = Report(
        given,
        f"One step, m = {given.chunks}, {WIDTH} numbers a micro-batch",
        columns=("", "ms, median", "quartiles", "µs per pair", "of it overhead"),
    )
    for mode, at_most in AT_MOST.items():
        beside_torchgpipe(given, report, mode, at_most)
    beside_processes(given, report)
    by_micro_batch(given, report)
    report.publish()


def beside_torchgpipe(
    given: Options, report: Report, mode: str, at_most: tuple[float, float]
) -> None:
    """Ours on threads, ours by the faster of both ways, ours on one device, and torchgpipe."""
    n, m = given.stages, given.chunks
    task = nearly_nothing(n, m)
    with ExitStack() as stack:
        balance, shared = [1] * n, {"chunks": m, "mode": mode}
        threads = ours(
            task, balance, devices=["cpu"] * n, name=f"ours, {n} threads, {mode}", **shared
        )
        auto = ours(
            task,
            balance,
            devices=["cpu"] * n,
            name=f"ours, {n} devices, auto, {mode}",
            on_threads="auto",
            **shared,
        )
        alone = ours(task, balance, devices=["cpu"], name=f"ours, one device, {mode}", **shared)
        theirs = torchgpipe(
            task, balance, devices=["cpu"] * n, name=f"torchgpipe, {mode}", **shared
        )
        reference = bare(task, m, f"no engine, {mode}")
        contestants: list[Contestant] = [
            reference,
            theirs,
            stack.enter_context(threads),
            stack.enter_context(auto),
            stack.enter_context(alone),
        ]
        times = timed(given, report, contestants, cells=n * m)
    limits = (*at_most, at_most[1])
    for each, limit in zip(contestants[2:], limits, strict=True):
        claim = f"{each.name} / torchgpipe"
        found = ratio(times, each.name, theirs.name, beyond=reference.name)
        report.target(f"overhead {claim}", found, at_most=limit)
        report.target(f"whole time {claim}", ratio(times, each.name, theirs.name))


def beside_processes(given: Options, report: Report) -> None:
    """Ours on two devices, and ScheduleGPipe in two processes."""
    n, m = PROCESSES, given.chunks
    task = nearly_nothing(n, m)
    with ExitStack() as stack:
        pipelined = ours(
            task,
            [1] * n,
            chunks=m,
            mode="never",
            devices=["cpu"] * n,
            name=f"ours, {n} devices, auto",
            on_threads="auto",
        )
        processes = pipelining(
            task, [1] * n, chunks=m, untimed=2, name=f"ScheduleGPipe, {n} processes, {n} stages"
        )
        mine, theirs = stack.enter_context(pipelined), stack.enter_context(processes)
        reference = bare(task, m, f"no engine, {n} layers")
        times = timed(given, report, [reference, theirs, mine], cells=n * m)
    found = ratio(times, mine.name, theirs.name)
    report.target(f"whole time {mine.name} / ScheduleGPipe", found, at_most=AT_MOST_OF_PROCESSES)


def by_micro_batch(given: Options, report: Report) -> None:
    """Ours with a loss for each micro-batch, and with that of the mini-batch."""
    n, m = given.stages, given.chunks
    task = nearly_nothing(n, m)
    reference = accumulated(task, chunks=m, name="no engine, a loss for each micro-batch")
    where = {f"{n} threads": ["cpu"] * n, "one device": ["cpu"]}
    ways: dict[str, ByMicroBatch | None] = {"fill-drain": None, "1F1B": "1f1b"}
    with ExitStack() as stack:
        contestants = [reference]
        for (place, devices), (way, schedule) in product(where.items(), ways.items()):
            each = ours(
                task,
                [1] * n,
                chunks=m,
                mode="never",
                devices=devices,
                schedule=schedule,
                name=f"ours, {place}, {way}",
            )
            contestants.append(stack.enter_context(each))
        times = timed(given, report, contestants, cells=n * m)
    for place in where:
        one, other = (f"ours, {place}, {way}" for way in ("1F1B", "fill-drain"))
        found = ratio(times, one, other)
        report.target(f"whole time {one} / fill-drain", found)


def nearly_nothing(layers: int, rows: int) -> Task:
    """So many layers that are hardly there, on micro-batches of one row."""
    torch.manual_seed(0)
    x = torch.randn(rows, WIDTH)
    return Task(
        nn.Sequential(*(Scale() for _ in range(layers))), x, torch.randn_like(x), mean_square
    )


def bare(task: Task, chunks: int, name: str) -> Contestant:
    """The layers on micro-batches, one after another, and one loss."""
    module = task.copy_of_module()

    def forward(x: Tensor) -> Tensor:
        return torch.cat([module(each) for each in x.chunk(chunks)])

    return task.contestant(name, forward, list(module.parameters()))


def timed(
    given: Options, report: Report, contestants: list[Contestant], *, cells: int
) -> dict[str, Times]:
    """Their times, which are also rows of the report."""
    agree(contestants)
    times = contest(contestants, rounds=given.rounds, warm_up=10)
    each = {name: 1e6 * found.median / cells for name, found in times.items()}
    least = each[contestants[0].name]
    report.times(
        times,
        {name: f"{pair:.1f}" for name, pair in each.items()},
        {name: f"{pair - least:.1f}" for name, pair in each.items()},
    )
    return times


if __name__ == "__main__":
    main()
