"""Claim: as processes, two stages train at least as fast as PyTorch's own pipeline over processes.

The task of ``cpu_pipeline``: equal transformer blocks in two balanced stages. Ours runs them as two
threads of one process and as two processes, torch.distributed.pipelining as two processes; each
worker has one intra-op thread, and nothing is recomputed. In every process of ours the user's code
gets the whole output and computes the loss of the mini-batch; in theirs the last stage computes a
loss by micro-batch. Other schedules are beside theirs in ``schedules_over_processes``.

    python -m benchmarks.processes

Throughput ours, processes / ScheduleGPipe (their time / ours) must be at least 1.0. A run in which
the plain module on one thread beats a pipeline does not count.

For information: threads beside processes where operators are small. Threads of one process wait for
one another under the interpreter's lock; processes do not, but pay for messages. So many narrow
blocks on short sequences run both ways, and the table has what an operator takes on a micro-batch,
backward included. Beside it stands how much longer threads take than the schedule lets two workers
take that do not wait for one another.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from statistics import median
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from benchmarks.contestants.ours import ours, ours_in_processes
from benchmarks.contestants.pipelining import pipelining
from benchmarks.contestants.plain import mean_square, plain
from benchmarks.contestants.task import Task
from benchmarks.cpu_pipeline import SIZES, STAGES, halves, transformer_task
from benchmarks.harness import Contestant, Options, Report, agree, contest, options, ratio
from benchmarks.models import transformer
from lightning_gpipe.core.schedules import fill_drain

THREADS, PROCESSES, THEIRS = "ours, threads", "ours, processes", "ScheduleGPipe, processes"
PLAIN = "plain, one thread"
WIDTHS = (16, 32, 64, 128, 256)  # of narrow blocks
NARROW, SHORT = 16, 32  # how many of them, and the tokens of a sequence
TIMED = 20  # micro-batches


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    given = options("processes", __doc__, rounds=11, argv=argv, **SIZES | {"blocks": 4})
    report = Report(
        given,
        f"One step of {given.blocks} transformer blocks, {STAGES} stages, m = {given.chunks}",
    )
    with ExitStack() as stack:
        task, balance = transformer_task(given), halves(given)
        contestants = field(stack, task, given, balance, untimed=0)
        agree(contestants)
        times = contest(contestants, rounds=given.rounds)
    report.times(times)
    report.target(
        f"throughput {PROCESSES} / {THEIRS}", ratio(times, THEIRS, PROCESSES), at_least=1.0
    )
    report.target(f"throughput {PROCESSES} / {THREADS}", ratio(times, THREADS, PROCESSES))
    for name in (THREADS, PROCESSES, THEIRS):
        report.target(f"throughput {name} / {PLAIN}", ratio(times, PLAIN, name))
    for width in WIDTHS:
        narrow(given, report, width)
    report.publish()


def narrow(given: Options, report: Report, width: int) -> None:
    """Threads beside processes for many blocks of a width, on short sequences."""
    torch.manual_seed(0)
    x = torch.randn(given.batch_size, SHORT, width)
    task = Task(transformer(NARROW, width), x, torch.randn_like(x), loss=mean_square)
    with ExitStack() as stack:
        contestants = field(stack, task, given, [NARROW // STAGES] * STAGES, untimed=2)
        times = contest(contestants, rounds=given.rounds)
    title = f"width {width}, {operator_time(task, given.chunks):.0f} us per operator"
    for name in (THREADS, THEIRS, PLAIN):
        report.target(f"{title}: throughput {PROCESSES} / {name}", ratio(times, name, PROCESSES))
    bubble = fill_drain(given.chunks, tuple(range(STAGES))).bubble
    late = ratio(times, THREADS, PLAIN)
    report.target(f"{title}: time {THREADS} / by the schedule", late * STAGES * (1 - bubble))


def operator_time(task: Task, chunks: int) -> float:
    """The microseconds of an operator, forward or backward, on a micro-batch, on one thread."""
    module = task.copy_of_module()
    x, target = task.x.chunk(chunks)[0], task.target.chunk(chunks)[0]

    def step() -> None:
        task.loss(module(x), target).backward()

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with Operators() as operators:
            step()
        taken = []
        for _ in range(TIMED):
            start = time.perf_counter()
            step()
            taken.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(before)
    return 1e6 * median(taken) / operators.number


class Operators(TorchDispatchMode):
    """Counts operators.

    Attributes:
        number: How many ran.
    """

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


def field(
    stack: ExitStack, task: Task, given: Options, balance: list[int], *, untimed: int
) -> list[Contestant]:
    """All contestants, for the duration of a stack."""
    m = given.chunks
    return [
        plain(task, name=PLAIN, threads=1),
        stack.enter_context(
            ours(
                task,
                balance,
                chunks=m,
                mode="never",
                devices=["cpu"] * STAGES,
                name=THREADS,
                threads=STAGES,
            )
        ),
        stack.enter_context(
            ours_in_processes(
                task,
                balance,
                chunks=m,
                mode="never",
                owners=range(STAGES),
                untimed=untimed,
                name=PROCESSES,
            )
        ),
        stack.enter_context(pipelining(task, balance, chunks=m, untimed=untimed, name=THEIRS)),
    ]


if __name__ == "__main__":
    main()
