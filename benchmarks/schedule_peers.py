"""For information: what schedules bring with layers that compute, ours and those of PyTorch.

The task of ``cpu_pipeline`` and ``peers``: equal transformer blocks on two cores. Ours runs each
schedule on two threads of a process of its own; torch.distributed.pipelining on two processes over
Gloo. Nobody recomputes. Where a device has two stages, these have half the blocks; ZB-V folds the
stages back, the others loop. All are started several times, since where a process has its tensors
in memory changes its time, and the rounds count as those of one contest.

    python -m benchmarks.schedule_peers

What a simulation says beside it is for layers whose F, B and W take equally long, and for devices
that share nothing. The claim on fill-drain is that of ``peers``. The machine must be quiet: two
threads, and the caller's, want two cores.
"""

from __future__ import annotations

import atexit
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from typing_extensions import override

from benchmarks.contestants.pipelining import Schedule, pipelining
from benchmarks.contestants.plain import mean_square
from benchmarks.contestants.processes import Orders, Role, in_processes
from benchmarks.contestants.task import Task
from benchmarks.cpu_pipeline import SIZES, transformer_task
from benchmarks.harness import Options, Report, Times, agree, contest, in_one, options, ratio
from benchmarks.schedules import BASE, WAYS, Way, relative, running

DEVICES = 2
WARM_UP = 4  # steps, in which the heap of each process grows


class Theirs(NamedTuple):
    """A schedule of theirs, the process of each stage, and which of ours is the same.

    Attributes:
        schedule: Their class.
        ranks: The process of each stage.
        ours: Ours, the same or near it; by the names of their :class:`~benchmarks.schedules.Way`.
    """

    schedule: Schedule
    ranks: tuple[int, ...]
    ours: tuple[str, ...]

    @property
    def name(self) -> str:
        """As the report has it."""
        return self.schedule.__name__


THEIRS = (
    Theirs(ScheduleGPipe, (0, 1), (BASE,)),
    Theirs(Schedule1F1B, (0, 1), ("1F1B",)),
    Theirs(ScheduleInterleaved1F1B, (0, 1, 0, 1), ("interleaved",)),
    Theirs(ScheduleZBVZeroBubble, (0, 1, 1, 0), ("zero bubble", "zero bubble, V")),
)


@dataclass
class Alone(Role):
    """The one process of a pipeline whose workers are threads.

    Attributes:
        way: The schedule.
        task: What to do.
        chunks: The number of micro-batches.
        untimed, threads: See :class:`~benchmarks.contestants.processes.Role`.
    """

    way: Way
    task: Task
    chunks: int
    untimed: int = 0
    threads: int = 1  # of each worker: a core for each stage

    @override
    def prepare(self, rank: int, world_size: int) -> Orders:
        stack = ExitStack()
        contestant, _ = stack.enter_context(running(self.way, self.task, DEVICES, self.chunks))
        atexit.register(stack.close)
        return Orders(contestant.step, contestant.gradients)


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    given = options(
        "schedule_peers", __doc__, rounds=7, argv=argv, starts=2, **SIZES | {"blocks": 4}
    )
    task = transformer_task(given)
    times = in_one(timed(task, given, start) for start in range(given.starts))
    title = f"One step of {given.blocks} transformer blocks, {DEVICES} devices, m = {given.chunks}"
    report = Report(given, title, ("", "ms, median", "quartiles", "simulated / fill-drain"))
    report.times(times, {ours(name): each for name, each in tables(given).items()})
    for way in WAYS[1:]:
        report.target(f"{ours(way.name)} / {BASE}", ratio(times, ours(way.name), ours(BASE)))
    for each in THEIRS:
        for mine in map(ours, each.ours):
            report.target(f"throughput {mine} / {each.name}", ratio(times, each.name, mine))
    first = THEIRS[0].name
    for each in THEIRS[1:]:
        report.target(f"{each.name} / {first}", ratio(times, each.name, first))
    report.publish()


def timed(task: Task, given: Options, start: int) -> dict[str, Times]:
    """The times of all, whose processes are started for them."""
    with ExitStack() as stack:
        contestants = [
            stack.enter_context(in_processes([Alone(way, task, given.chunks)], ours(way.name)))
            for way in WAYS
        ]
        for each in THEIRS:
            balance = [given.blocks // len(each.ranks)] * len(each.ranks)
            theirs = pipelining(
                task,
                balance,
                chunks=given.chunks,
                schedule=each.schedule,
                ranks=each.ranks,
                name=each.name,
            )
            contestants.append(stack.enter_context(theirs))
        agree(contestants)
        return contest(contestants, rounds=given.rounds, warm_up=WARM_UP, seed=start)


def tables(given: Options) -> dict[str, str]:
    """How long each of ours takes in the simulation, relative to fill-drain, by its table."""
    x = torch.zeros(given.chunks, 1)
    small = Task(nn.Sequential(*(nn.Linear(1, 1) for _ in range(given.blocks))), x, x, mean_square)
    schedules = {}
    for way in WAYS:
        with running(way, small, DEVICES, given.chunks) as (contestant, schedule_of):
            contestant.step()
            schedules[way.name] = schedule_of()
    return relative(schedules)


def ours(name: str) -> str:
    """The name of one of ours in the report."""
    return f"ours, {name}"


if __name__ == "__main__":
    main()
