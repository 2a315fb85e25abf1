"""Claim: as processes, two stages train at least as fast as PyTorch's own pipeline over processes.

The task of ``cpu_pipeline``: equal transformer blocks in two balanced stages. Ours runs them as two
threads of one process and as two processes, torch.distributed.pipelining as two processes; each
worker has one intra-op thread, and nothing is recomputed. In every process of ours the user's code
gets the whole output and computes the loss of the mini-batch; in theirs the last stage computes a
loss by micro-batch.

    python -m benchmarks.processes

Throughput ours, processes / ScheduleGPipe (their time / ours) must be at least 1.0. A run in which
the plain module on one thread beats a pipeline does not count. For information: threads beside
processes for blocks that compute less and less, where one interpreter's lock lets threads wait.
"""

from __future__ import annotations

from contextlib import ExitStack

import torch

from benchmarks.contestants.ours import ours, ours_in_processes
from benchmarks.contestants.pipelining import pipelining
from benchmarks.contestants.plain import mean_square, plain
from benchmarks.contestants.task import Task
from benchmarks.cpu_pipeline import SIZES, STAGES, halves, transformer_task
from benchmarks.harness import Contestant, Options, Report, agree, contest, options, ratio
from benchmarks.models import transformer

THREADS, PROCESSES, THEIRS = "ours, threads", "ours, processes", "ScheduleGPipe, processes"
PLAIN = "plain, one thread"
WIDTHS = (16, 32, 64, 128)  # of smaller blocks


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    given = options("processes", __doc__, rounds=11, argv=argv, **SIZES | {"blocks": 4})
    report = Report(
        given,
        f"One step of {given.blocks} transformer blocks, {STAGES} stages, m = {given.chunks}",
    )
    with ExitStack() as stack:
        contestants = field(stack, transformer_task(given), given, untimed=0)
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
        if width < given.width:
            smaller(given, report, width)
    report.publish()


def smaller(given: Options, report: Report, width: int) -> None:
    """Threads beside processes for narrow blocks on short sequences."""
    torch.manual_seed(0)
    x = torch.randn(given.batch_size, 32, width)
    task = Task(transformer(given.blocks, width), x, torch.randn_like(x), loss=mean_square)
    with ExitStack() as stack:
        contestants = field(stack, task, given, untimed=2)
        times = contest(contestants, rounds=given.rounds)
    for name in (THREADS, THEIRS, PLAIN):
        title = f"width {width}, 32 tokens: throughput {PROCESSES} / {name}"
        report.target(title, ratio(times, name, PROCESSES))


def field(stack: ExitStack, task: Task, given: Options, *, untimed: int) -> list[Contestant]:
    """All contestants, for the duration of a stack."""
    balance, m = halves(given), given.chunks
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
