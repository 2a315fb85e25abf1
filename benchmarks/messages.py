"""Claim: a message between stages as processes takes at most 0.8 of PyTorch's time.

Between two stages as processes each micro-batch is a message with a header; the output of the last
stage goes to all processes, since the user's code computes the loss in each; and the batch comes
from the first process, which alone has the loader. So:

- a step of two stages with next to nothing to compute, as processes, as threads and by
  ScheduleGPipe, per (stage, micro-batch) pair;
- a step whose output is large, beside one whose last layer computes the loss;
- a batch that the first process hands to the other.

Time per pair, ours / ScheduleGPipe's, must be at most 0.8; the others are for information.

    python -m benchmarks.messages
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from benchmarks.contestants.ours import ours, ours_in_processes
from benchmarks.contestants.pipelining import pipelining
from benchmarks.contestants.processes import Orders, Role, in_processes
from benchmarks.contestants.task import Task
from benchmarks.harness import Contestant, Options, Report, Times, agree, contest, options, ratio
from benchmarks.overhead import nearly_nothing
from lightning_gpipe.distributed.group import Group

STAGES, UNTIMED = 2, 2
MIB = 2**20
ROWS, WIDTH = 8, 16


class Wide(nn.Module):
    """The last layer: its output has so many numbers for each row, or one, which is their mean.

    Args:
        numbers: How many there are.
        reduced: Whether it returns the mean.
    """

    def __init__(self, numbers: int, *, reduced: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(numbers))
        self.reduced = reduced

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, WIDTH) to (rows, numbers), or to (rows, 1)."""
        y = x.mean(-1, keepdim=True) * self.weight
        return y.square().mean(-1, keepdim=True) if self.reduced else y


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    given = options("messages", __doc__, rounds=15, argv=argv, chunks=32, mib="1,16")
    report = Report(given, "Two stages on the CPU", columns=("", "ms, median", "quartiles", "is"))
    headers(given, report)
    for mib in map(int, given.mib.split(",")):
        outputs(given, report, mib)
        batches(given, report, mib)
    report.publish()


def headers(given: Options, report: Report) -> None:
    """Micro-batches with next to nothing in them."""
    task, m, balance = nearly_nothing(STAGES, given.chunks), given.chunks, [1] * STAGES
    shared: dict[str, Any] = {"chunks": m, "mode": "never"}
    with ExitStack() as stack:
        contestants: list[Contestant] = [
            stack.enter_context(
                ours(task, balance, devices=["cpu"] * STAGES, name="threads", **shared)
            ),
            stack.enter_context(
                ours_in_processes(
                    task, balance, owners=range(STAGES), untimed=UNTIMED, name="processes", **shared
                )
            ),
            stack.enter_context(
                pipelining(task, balance, chunks=m, untimed=UNTIMED, name="ScheduleGPipe")
            ),
        ]
        agree(contestants)
        times = contest(contestants, rounds=given.rounds)
    pairs = STAGES * m
    each = {name: f"{1e6 * x.median / pairs:.0f} µs per pair" for name, x in times.items()}
    report.times(times, each)
    report.target(
        "time per pair, processes / ScheduleGPipe",
        ratio(times, "processes", "ScheduleGPipe"),
        at_most=0.8,
    )


def outputs(given: Options, report: Report, mib: int) -> None:
    """An output of so many MiB, and a loss of it in the last layer."""
    numbers = mib * MIB // 4 // ROWS
    names = (f"output of {mib} MiB", f"its loss in the last layer, {mib} MiB")
    times: dict[str, Times] = {}
    for name, reduced in zip(names, (False, True), strict=True):
        torch.manual_seed(0)
        x = torch.randn(ROWS, WIDTH)
        task = Task(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), Wide(numbers, reduced=reduced)),
            x,
            torch.zeros(1),
            loss=_mean if reduced else _mean_square,
        )
        shared: dict[str, Any] = {"chunks": 4, "mode": "never", "owners": range(STAGES)}
        with ours_in_processes(task, [1, 1], untimed=UNTIMED, name=name, **shared) as each:
            times |= contest([each], rounds=given.rounds)
    more = times[names[0]].median - times[names[1]].median
    report.times(times, {names[0]: f"{1e3 * more / mib:.1f} ms per MiB more", names[1]: ""})


def batches(given: Options, report: Report, mib: int) -> None:
    """A batch of so many MiB."""
    name = f"batch of {mib} MiB"
    with in_processes([Hands(mib) for _ in range(STAGES)], name) as each:
        times = contest([each], rounds=given.rounds)
    report.times(times, {name: f"{1e3 * times[name].median / mib:.1f} ms per MiB"})


@dataclass
class Hands(Role):
    """Hands a batch over, or takes it.

    Attributes:
        mib: Its size.
    """

    mib: int
    threads: int = 1
    untimed: int = UNTIMED

    @override
    def prepare(self, rank: int, world_size: int) -> Orders:
        group = Group(timedelta(seconds=60))
        batch = torch.ones(self.mib * MIB // 4) if rank == 0 else None
        return Orders(lambda: group.broadcast(batch), _nothing)


def _nothing() -> Sequence[Tensor]:
    return []


def _mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def _mean(output: Tensor, _: Tensor) -> Tensor:
    return output.mean()


if __name__ == "__main__":
    main()
