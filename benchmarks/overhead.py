"""Claim: a micro-batch costs the pipeline little beside what its layers compute.

Layers that compute next to nothing leave only what the engine does around them: handing over,
cutting the graph, calling backward. Four stages and 32 micro-batches of one row of eight numbers;
what is reported is the time of a step, forward and backward, divided by the number of (stage,
micro-batch) pairs. It includes the layer itself, one multiplication, so the ratios are no better
than those of the overhead alone.

    python -m benchmarks.overhead

Ours is measured with four worker threads and with all stages on one device, which needs none.
"""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import Tensor, nn

from benchmarks.contestants.ours import ours
from benchmarks.contestants.plain import accumulated, mean_square
from benchmarks.contestants.task import Task
from benchmarks.contestants.torchgpipe import torchgpipe
from benchmarks.harness import Contestant, Report, Times, agree, contest, options, ratio

WIDTH = 8
AT_MOST = {"never": 0.40, "always": 0.35}


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
    n, m = given.stages, given.chunks
    torch.manual_seed(0)
    x = torch.randn(m, WIDTH)
    task = Task(nn.Sequential(*(Scale() for _ in range(n))), x, torch.randn(m, WIDTH), mean_square)

    report = Report(
        given,
        f"One step, {n} stages, m = {m}, {WIDTH} numbers a micro-batch",
        columns=("", "ms, median", "quartiles", "µs per stage and micro-batch"),
    )
    for mode, at_most in AT_MOST.items():
        with ExitStack() as stack:
            balance, shared = [1] * n, {"chunks": m, "mode": mode}
            threads = ours(
                task, balance, devices=["cpu"] * n, name=f"ours, {n} threads, {mode}", **shared
            )
            alone = ours(task, balance, devices=["cpu"], name=f"ours, one device, {mode}", **shared)
            theirs = torchgpipe(
                task, balance, devices=["cpu"] * n, name=f"torchgpipe, {mode}", **shared
            )
            reference = accumulated(task, chunks=m, name=f"no pipeline, {mode}")
            contestants: list[Contestant] = [
                reference,
                theirs,
                stack.enter_context(threads),
                stack.enter_context(alone),
            ]
            agree(contestants)
            times = contest(contestants, rounds=given.rounds, warm_up=5)
        report.times(times, {name: _each(each, n * m) for name, each in times.items()})
        for each in contestants[2:]:
            found = ratio(times, each.name, theirs.name)
            report.target(f"{each.name} / torchgpipe", found, at_most=at_most)
    report.publish()


def _each(times: Times, cells: int) -> str:
    return f"{1e6 * times.median / cells:.1f}"


if __name__ == "__main__":
    main()
