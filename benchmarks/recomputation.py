"""Claim: recomputation costs no more than ``torch.utils.checkpoint`` around the same stages.

On one device there is nothing to overlap: ``always`` runs every stage's forward twice and its
backward once, for one micro-batch after another, and so does a loop over the micro-batches with
``checkpoint(stage, x, use_reentrant=False)`` that accumulates the gradients. There is one thread,
and the blocks are large. The loop has another order: backward of a micro-batch comes right after
its forward, and before the forward of the next.

    python -m benchmarks.recomputation

For information, both without recomputation.
"""

from __future__ import annotations

import torch

from benchmarks.contestants.ours import ours
from benchmarks.contestants.plain import accumulated, mean_square
from benchmarks.contestants.task import Task
from benchmarks.harness import Report, agree, contest, options, ratio
from benchmarks.models.transformer import transformer

AT_MOST = 1.02


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    given = options(
        "recomputation",
        __doc__,
        rounds=30,
        argv=argv,
        stages=4,
        blocks=8,
        width=256,
        time=128,
        batch_size=8,
        chunks=4,
    )
    torch.manual_seed(0)
    m, balance = given.chunks, [given.blocks // given.stages] * given.stages
    shape = (given.batch_size, given.time, given.width)
    module = transformer(given.blocks, given.width)
    task = Task(module, torch.randn(shape), torch.randn(shape), mean_square)

    report = Report(given, f"One step, {given.stages} stages on one device, m = {m}, one thread")
    alone = {"chunks": m, "devices": ["cpu"], "threads": 1}
    with (
        ours(task, balance, mode="always", name="ours, always", **alone) as always,
        ours(task, balance, mode="never", name="ours, never", **alone) as never,
    ):
        checkpointed = accumulated(
            task, chunks=m, stages=balance, name="torch.utils.checkpoint", threads=1
        )
        kept = accumulated(task, chunks=m, name="gradient accumulation", threads=1)
        contestants = [checkpointed, always, kept, never]
        agree(contestants)
        times = contest(contestants, rounds=given.rounds)
    report.times(times)
    for mine, other, at_most in ((always, checkpointed, AT_MOST), (never, kept, None)):
        found = ratio(times, mine.name, other.name)
        report.target(f"{mine.name} / {other.name}", found, at_most=at_most)
    report.publish()


if __name__ == "__main__":
    main()
