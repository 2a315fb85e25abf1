"""Claim: each schedule over processes is at least as fast as PyTorch's own of the same name.

The task of ``cpu_pipeline``: equal transformer blocks in balanced stages. Ours and
torch.distributed.pipelining run it as two and as four processes, each with one intra-op
thread, and nothing is recomputed. The process of the last stage gets the outputs and computes the
loss (``outputs="last"``), of the mini-batch for fill-drain and of each micro-batch for the others.
Each does some steps first that are not timed, as many as the others: in these its heap grows. Where
in memory a process has its tensors, and so which of them share a place in a cache, changes its time
by some percent for as long as it lives: so all are started several times, with places of their own,
and the rounds count as those of one contest.

    python -m benchmarks.schedules_over_processes

Throughput ours / theirs (their time / ours) must be at least 1.0. Where there are fewer cores than
processes, these share them, and the ratio says who computes and sends less beside the layers. It
takes some twenty minutes on two cores, so it is not one of those that `make bench` runs.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import NamedTuple

from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleZBVZeroBubble

from benchmarks.contestants.ours import ours_in_processes
from benchmarks.contestants.pipelining import Schedule, pipelining
from benchmarks.contestants.task import Task
from benchmarks.cpu_pipeline import SIZES, transformer_task
from benchmarks.harness import (
    Contestant,
    Options,
    Report,
    Times,
    agree,
    contest,
    in_one,
    options,
    ratio,
)
from lightning_gpipe.core.schedules import ByMicroBatch

PROCESSES = (2, 4)
WARM_UP = 6  # steps, after which the heap of none grows


class Pair(NamedTuple):
    """A schedule of ours and theirs; ``folded`` has two stages in each process, as a V."""

    name: str
    ours: ByMicroBatch | None
    theirs: Schedule
    folded: bool = False


PAIRS = (
    Pair("fill-drain", None, ScheduleGPipe),
    Pair("1F1B", "1f1b", Schedule1F1B),
    Pair("zero bubble, V", "zero_bubble_v", ScheduleZBVZeroBubble, folded=True),
)


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    given = options("schedules_over_processes", __doc__, rounds=5, argv=argv, starts=2, **SIZES)
    title = f"One step of {given.blocks} transformer blocks over processes, m = {given.chunks}"
    report, task = Report(given, title), transformer_task(given)
    for processes in PROCESSES:
        times = in_one(timed(task, given, processes, start) for start in range(given.starts))
        report.times(times)
        for pair in PAIRS:
            mine, other = names(pair, processes)
            report.target(f"throughput {mine} / theirs", ratio(times, other, mine), at_least=1.0)
    report.publish()


def timed(task: Task, given: Options, processes: int, start: int) -> dict[str, Times]:
    """The times of all pairs, whose processes are started for them."""
    with ExitStack() as stack:
        contestants = [
            contestant
            for pair in PAIRS
            for contestant in beside(stack, task, given, pair, processes)
        ]
        agree(contestants)
        return contest(contestants, rounds=given.rounds, warm_up=WARM_UP, seed=start)


def names(pair: Pair, processes: int) -> tuple[str, str]:
    """The names of ours and theirs, as the report has them."""
    return (
        f"ours, {pair.name}, {processes} processes",
        f"{pair.theirs.__name__}, {processes} processes",
    )


def beside(
    stack: ExitStack, task: Task, given: Options, pair: Pair, processes: int
) -> list[Contestant]:
    """Ours and theirs, for the duration of a stack."""
    there, mine_and_theirs = list(range(processes)), names(pair, processes)
    ranks = [*there, *reversed(there)] if pair.folded else there
    balance = [given.blocks // len(ranks)] * len(ranks)
    m = given.chunks
    return [
        stack.enter_context(
            ours_in_processes(
                task,
                balance,
                chunks=m,
                mode="never",
                owners=there,
                schedule=pair.ours,
                folded=pair.folded,
                at_last=True,
                name=mine_and_theirs[0],
            )
        ),
        stack.enter_context(
            pipelining(
                task,
                balance,
                chunks=m,
                schedule=pair.theirs,
                ranks=ranks,
                name=mine_and_theirs[1],
            )
        ),
    ]


if __name__ == "__main__":
    main()
