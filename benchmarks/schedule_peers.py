"""For information: what schedules bring with layers that compute, ours and those of PyTorch.

The task of ``cpu_pipeline`` and ``peers``: equal transformer blocks on two cores. Ours runs each
schedule on two threads; torch.distributed.pipelining on two processes over Gloo. Nobody recomputes.
Where a device has two stages, these have half the blocks; ZB-V folds the stages back, the others
loop.

    python -m benchmarks.schedule_peers

What a simulation says beside it is for layers whose F, B and W take equally long, and for devices
that share nothing. The claim on fill-drain is that of ``peers``. The machine must be quiet: two
threads, and the caller's, want two cores.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from benchmarks.contestants.pipelining import Schedule, pipelining
from benchmarks.cpu_pipeline import SIZES, transformer_task
from benchmarks.harness import Report, agree, contest, options, ratio
from benchmarks.schedules import BASE, WAYS, Way, relative, running

DEVICES = 2


class Theirs(NamedTuple):
    """A schedule of theirs, the process of each stage, and which of ours is the same.

    Attributes:
        schedule: Their class.
        ranks: The process of each stage.
        ours: Ours, the same or the nearest; by the name of its :class:`~benchmarks.schedules.Way`.
    """

    schedule: Schedule
    ranks: tuple[int, ...]
    ours: str

    @property
    def name(self) -> str:
        """As the report has it."""
        return self.schedule.__name__


THEIRS = (
    Theirs(ScheduleGPipe, (0, 1), BASE),
    Theirs(Schedule1F1B, (0, 1), "1F1B"),
    Theirs(ScheduleInterleaved1F1B, (0, 1, 0, 1), "interleaved"),
    Theirs(ScheduleZBVZeroBubble, (0, 1, 1, 0), "zero bubble"),
)


def ours(way: Way) -> Way:
    """One of ours, named so."""
    return way._replace(name=f"ours, {way.name}")


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    given = options("schedule_peers", __doc__, rounds=15, argv=argv, **SIZES | {"blocks": 4})
    torch.set_num_threads(1)  # a core for each stage
    task, m = transformer_task(given), given.chunks
    with ExitStack() as stack:
        made = [stack.enter_context(running(ours(way), task, DEVICES, m)) for way in WAYS]
        contestants = [contestant for contestant, _ in made]
        for each in THEIRS:
            balance = [given.blocks // len(each.ranks)] * len(each.ranks)
            theirs = pipelining(
                task, balance, chunks=m, schedule=each.schedule, ranks=each.ranks, name=each.name
            )
            contestants.append(stack.enter_context(theirs))
        agree(contestants)
        times = contest(contestants, rounds=given.rounds)
        schedules = {
            way.name: schedule_of() for way, (_, schedule_of) in zip(WAYS, made, strict=True)
        }

    title = f"One step of {given.blocks} transformer blocks, {DEVICES} devices, m = {m}"
    report = Report(given, title, ("", "ms, median", "quartiles", "simulated / fill-drain"))
    report.times(times, {f"ours, {name}": each for name, each in relative(schedules).items()})
    for way in WAYS[1:]:
        found = ratio(times, ours(way).name, f"ours, {BASE}")
        report.target(f"{ours(way).name} / fill-drain", found)
    for each in THEIRS:
        mine = f"ours, {each.ours}"
        report.target(f"throughput {mine} / {each.name}", ratio(times, each.name, mine))
    first = THEIRS[0].name
    for each in THEIRS[1:]:
        report.target(f"{each.name} / {first}", ratio(times, each.name, first))
    report.publish()


if __name__ == "__main__":
    main()
