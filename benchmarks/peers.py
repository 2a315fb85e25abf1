"""Claim: two stages train faster than PyTorch's own pipeline, and than torchgpipe recomputing.

The task of ``cpu_pipeline``: equal transformer blocks in two balanced stages, which compute enough
that transfers do not matter. It is compared with

- torch.distributed.pipelining: two processes with one thread each, ScheduleGPipe and, for
  information, Schedule1F1B. Neither recomputes. Their loss is computed by micro-batch within the
  last stage; ours, as the user writes it, on the whole mini-batch between forward and backward.
- torchgpipe and fairscale: on CPU both run all stages on one worker thread and backward on the
  caller's, so they use more than one core only within operators. Each is measured with one intra-op
  thread and with two, and compared by the better median.

Ours has two worker threads with one intra-op thread each. Plain means one device and both cores,
the mini-batch at once or by micro-batch: no pipeline, for information.

    python -m benchmarks.peers

Throughput ours / theirs (their time / ours) must be at least 1.0 against ScheduleGPipe and, with
recomputation ("always" on both sides), at least 1.15 against torchgpipe. Without recomputation
there is no claim against torchgpipe: two threads within each operator have no bubble, a pipeline of
two stages has one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Literal

from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from benchmarks.contestants.fairscale import fairscale
from benchmarks.contestants.ours import ours
from benchmarks.contestants.pipelining import pipelining
from benchmarks.contestants.plain import accumulated, plain
from benchmarks.contestants.task import Task
from benchmarks.contestants.torchgpipe import torchgpipe
from benchmarks.cpu_pipeline import SIZES, STAGES, halves, transformer_task
from benchmarks.harness import Contestant, Options, Report, Times, agree, contest, options, ratio

Mode = Literal["never", "always"]
MODES: tuple[Mode, ...] = ("never", "always")
THREADS = (1, 2)
GPIPE, ONE_F_ONE_B = "ScheduleGPipe", "Schedule1F1B"


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    given = options("peers", __doc__, rounds=11, argv=argv, **SIZES | {"blocks": 4})
    with field(given, transformer_task(given)) as contestants:
        agree(contestants)
        times = contest(contestants, rounds=given.rounds)
    best = {
        (package, mode): fastest(times, [theirs(package, mode, threads) for threads in THREADS])
        for package in ("torchgpipe", "fairscale")
        for mode in MODES
    }

    report = Report(
        given,
        f"One step of {given.blocks} transformer blocks, {STAGES} stages, m = {given.chunks}",
    )
    report.times(times)

    def target(mode: Mode, other: str, *, at_least: float | None = None) -> None:
        found = ratio(times, other, mine(mode))
        report.target(f"throughput {mine(mode)} / {other}", found, at_least=at_least)

    target("never", GPIPE, at_least=1.0)
    target("always", best["torchgpipe", "always"], at_least=1.15)
    target("never", ONE_F_ONE_B)
    target("never", best["torchgpipe", "never"])
    target("always", best["fairscale", "always"])
    target("never", best["fairscale", "never"])
    report.publish()


def mine(mode: Mode) -> str:
    """The name of ours."""
    return f"ours, {mode}"


def theirs(package: str, mode: Mode, threads: int) -> str:
    """The name of one that has intra-op threads."""
    return f"{package}, {mode}, {threads} thread{'s' * (threads > 1)}"


def fastest(times: Mapping[str, Times], names: list[str]) -> str:
    """The name with the best median."""
    return min(names, key=lambda name: times[name].median)


@contextmanager
def field(given: Options, task: Task) -> Iterator[list[Contestant]]:
    """All who take part, the reference first, for the duration of a ``with`` block."""
    balance, m, devices = halves(given), given.chunks, ["cpu"] * STAGES
    contestants = [
        plain(task, name="plain", threads=STAGES),
        accumulated(task, chunks=m, threads=STAGES),
    ]
    with ExitStack() as stack:
        for name, schedule in ((GPIPE, ScheduleGPipe), (ONE_F_ONE_B, Schedule1F1B)):
            processes = pipelining(task, balance, chunks=m, schedule=schedule, name=name)
            contestants.append(stack.enter_context(processes))
        for mode in MODES:
            pipelined = ours(
                task,
                balance,
                chunks=m,
                mode=mode,
                devices=devices,
                name=mine(mode),
                threads=STAGES,  # the workers share them
            )
            contestants.append(stack.enter_context(pipelined))
            for threads in THREADS:
                contestants.append(
                    torchgpipe(
                        task,
                        balance,
                        chunks=m,
                        mode=mode,
                        devices=devices,
                        name=theirs("torchgpipe", mode, threads),
                        threads=threads,
                    )
                )
                other = fairscale(
                    task,
                    balance,
                    chunks=m,
                    mode=mode,
                    devices=devices,
                    name=theirs("fairscale", mode, threads),
                    threads=threads,
                )
                contestants.append(stack.enter_context(other))
        yield contestants


if __name__ == "__main__":
    main()
