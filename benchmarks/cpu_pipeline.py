"""Claim: on CPU, two stages on two cores run as fast as this machine lets two threads run.

A pipeline of two equal stages cannot be twice as fast as one thread: there is the bubble, and two
busy cores share caches, memory and clock. So beside the plain module on one thread, the *measured
limit* is timed: the two halves of the model run all their micro-batches at the same time, on two
threads that do not wait for one another, and that time is multiplied by (m + 1) / m for the bubble.
The difference between the limit and the pipeline is the pipeline's own cost.

The model is a transformer of equal blocks, so that the stages are balanced. Every stage has one
thread, and so has each half of the limit; with ``cores=2`` a stage has two while the other one
waits, so that a part of the bubble is used. A step is a forward and a backward of one mini-batch,
with gradients that are None before.

    python -m benchmarks.cpu_pipeline

The ratio limit / pipeline must be at least 0.96 without recomputation, and 1.05 with ``cores=2``.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from typing import Any

import torch

from benchmarks.contestants.ours import ours
from benchmarks.contestants.plain import mean_square, plain
from benchmarks.contestants.task import Task
from benchmarks.harness import Contestant, Options, Report, agree, contest, options, ratio
from benchmarks.models import transformer
from lightning_gpipe.core.schedules import ActivationCheckpointing

STAGES = 2
LIMIT = "the limit: two halves at once x (m + 1) / m"
CORES = f"never, cores={STAGES}"
AT_LEAST = {"never": 0.96, CORES: 1.05}
WAYS: dict[str, ActivationCheckpointing] = {
    "never": "never",
    CORES: "never",
    "except_last": "except_last",
    "always": "always",
}
SIZES: dict[str, Any] = {"blocks": 8, "width": 256, "time": 128, "batch_size": 16, "chunks": 8}


def transformer_task(given: Options) -> Task:
    """Blocks that compute much, and a mini-batch for them, in the sizes that were asked for."""
    torch.manual_seed(0)
    x = torch.randn(given.batch_size, given.time, given.width)
    return Task(transformer(given.blocks, given.width), x, torch.randn_like(x), loss=mean_square)


def halves(given: Options) -> list[int]:
    """The balance of the two stages."""
    assert given.blocks % STAGES == 0, "the halves must be equal: --blocks must be even"
    return [given.blocks // STAGES] * STAGES


def limit(task: Task, balance: list[int], *, chunks: int) -> Contestant:
    """The parts of the model all at once, each on a thread of its own, as if it had all it needs.

    A micro-batch of the mini-batch stands for what comes in, one of the target for its gradient;
    so their gradients are not those of the model. The time is what it would be with the bubble.
    """
    module, bubble = task.copy_of_module(), (chunks + len(balance) - 1) / chunks
    ends = [sum(balance[: k + 1]) for k in range(len(balance))]
    parts = [module[end - size : end] for end, size in zip(ends, balance, strict=True)]

    def run(part: torch.nn.Module) -> None:
        torch.set_num_threads(1)
        part.zero_grad()
        outputs = [part(piece.clone().requires_grad_()) for piece in task.x.chunk(chunks)]
        gradients = task.target.chunk(chunks)
        for output, gradient in zip(reversed(outputs), reversed(gradients), strict=True):
            output.backward(gradient)

    def step() -> float:
        start = time.perf_counter()
        threads = [threading.Thread(target=run, args=(part,)) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return (time.perf_counter() - start) * bubble

    return Contestant(LIMIT, step, gradients=list, threads=len(balance))


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    given = options("cpu_pipeline", __doc__, rounds=20, argv=argv, **SIZES)
    task, balance, m = transformer_task(given), halves(given), given.chunks
    with ExitStack() as stack:
        one = plain(task, name="plain, one thread", threads=1)
        two = plain(task, name="plain, two threads", threads=STAGES)
        pipelined = {
            way: stack.enter_context(
                ours(
                    task,
                    balance,
                    chunks=m,
                    mode=mode,
                    devices=["cpu"] * STAGES,
                    name=f"pipeline, {way}",
                    threads=STAGES,  # the workers share them
                    cores=STAGES if way == CORES else None,
                )
            )
            for way, mode in WAYS.items()
        }
        agree([one, two, *pipelined.values()])
        contestants = [one, two, limit(task, balance, chunks=m), *pipelined.values()]
        times = contest(contestants, rounds=given.rounds)

    report = Report(
        given,
        f"One step of {given.blocks} transformer blocks, {STAGES} stages, m = {m}",
        columns=("", "ms, median", "quartiles", "x one thread"),
    )
    faster = {each.name: f"{ratio(times, one.name, each.name):.3f}" for each in contestants}
    report.times(times, faster)
    for way, each in pipelined.items():
        found = ratio(times, LIMIT, each.name)
        report.target(f"limit / {each.name}", found, at_least=AT_LEAST.get(way))
    report.publish()


if __name__ == "__main__":
    main()
