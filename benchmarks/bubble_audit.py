"""Claim: why workers are idle, cause by cause; for information, there is no target.

By the schedule, a worker of n stages and m micro-batches is idle for (n - 1) / (m + n - 1) of the
time. In a real run it is idle for longer, and this benchmark measures the share of each other
cause: unequal stages, actions of varying duration, cores used by others, the interpreter lock, and
what happens between actions, such as transfers. benchmarks/harness/audit.py says how the causes are
separated.

    python -m benchmarks.bubble_audit

On CPU threads, in the order of the table: two equal stages that compute, without recomputation and
with; two stages of which one has three times the layers, to show that imbalance is detected; and
four stages and 32 micro-batches of nearly empty layers, the worst case for the lock and for
transfers, beside the same on one thread, which has neither. With a GPU, four stages on it. Each
runs a number of mini-batches, after a check that it computes the same gradients as the plain
module; the figures are means over the middle half of them, by duration.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.contestants.plain import mean_square, plain
from benchmarks.contestants.task import Task
from benchmarks.harness import Options, Report, agree, options
from benchmarks.harness.audit import PARTS, Audit, Row, audit, typical
from benchmarks.harness.thread_clock import ACCOUNTED, Moment, thread_clocks
from benchmarks.models.transformer import transformer
from benchmarks.overhead import WIDTH, Scale
from lightning_gpipe import GPipe
from lightning_gpipe.core.run.observe.timeline import Timeline
from lightning_gpipe.core.schedules import ActivationCheckpointing

MODES: tuple[ActivationCheckpointing, ...] = ("never", "always")
TINY_STAGES, TINY_CHUNKS = 4, 32
WARM_UP = 3


@dataclass(frozen=True)
class Case:
    """A pipeline to look at.

    Attributes:
        name: As the report has it.
        task: What it does.
        balance: The number of layers in each stage.
        chunks: The number of micro-batches.
        devices: One per worker.
        mode: Which micro-batches are recomputed.
        clocks: What the workers' clocks are while it runs.
        audit: Makes an audit of the timeline.
    """

    name: str
    task: Task
    balance: Sequence[int]
    chunks: int
    devices: Sequence[str]
    mode: ActivationCheckpointing
    clocks: Callable[[], AbstractContextManager[None]]
    audit: Callable[[Timeline], Audit]


def of_threads(timeline: Timeline) -> Audit:
    """The audit of what threads did that read a ThreadClock."""
    computing, queued = {}, {}
    for _, action, start, end in timeline.spans:
        assert isinstance(start, Moment) and isinstance(end, Moment), "workers have ThreadClocks"
        computing[action] = end.computed - start.computed
        queued[action] = end.queued - start.queued
    return audit(timeline, computing, queued)


def of_stream(timeline: Timeline) -> Audit:
    """The audit of what a GPU did, as if it computed all the time between an action's events."""
    return audit(timeline, {span.action: span.end - span.start for span in timeline.spans})


def on_cpu(given: Options) -> Iterator[Case]:
    """The pipelines on CPU threads."""

    def case(
        name: str,
        task: Task,
        balance: list[int],
        m: int,
        mode: ActivationCheckpointing,
        workers: int | None = None,
    ) -> Case:
        devices = ["cpu"] * (workers or len(balance))
        return Case(name, task, balance, m, devices, mode, thread_clocks, of_threads)

    task, m = blocks(given.blocks, given.width, given.time, given.rows), given.chunks
    half, quarter = given.blocks // 2, given.blocks // 4
    for mode in MODES:
        yield case(f"2 equal, {mode}", task, [half, given.blocks - half], m, mode)
    yield case("1 : 3, never", task, [quarter, given.blocks - quarter], m, "never")

    n, m = TINY_STAGES, TINY_CHUNKS
    layers = nn.Sequential(*(Scale() for _ in range(n)))
    task = Task(layers, torch.randn(m, WIDTH), torch.randn(m, WIDTH), mean_square)
    for mode in MODES:
        yield case(f"4 tiny, {mode}", task, [1] * n, m, mode)
        yield case("the same, 1 thread", task, [1] * n, m, mode, workers=1)


def on_gpu(given: Options, device: str = "cuda:0") -> Iterator[Case]:
    """Four stages on one GPU: what it did, and what one thread and four did to drive it."""
    task, m = blocks(8, given.gpu_width, 8 * given.time, given.rows, device), given.chunks
    one, four = [device], [device] * 4
    yield Case("GPU", task, [2] * 4, m, one, "never", nullcontext, of_stream)
    yield Case("GPU, its 1 thread", task, [2] * 4, m, one, "never", thread_clocks, of_threads)
    yield Case("GPU, 4 threads", task, [2] * 4, m, four, "never", thread_clocks, of_threads)


def blocks(number: int, width: int, time: int, rows: int, device: str = "cpu") -> Task:
    """Layers that compute, all the same."""
    with torch.device(device):
        x, target = torch.randn(rows, time, width), torch.randn(rows, time, width)
        return Task(transformer(number, width), x, target, mean_square)


def run(case: Case, rounds: int) -> tuple[Audit, float]:
    """Run mini-batches; return their audit, and the share of a step that is outside the halves."""
    model = GPipe(
        case.task.copy_of_module(),
        case.balance,
        devices=case.devices,
        chunks=case.chunks,
        activation_checkpointing=case.mode,
        threads=True,
    )
    contestant = case.task.contestant(case.name, model, list(model.parameters()))
    audits, steps = [], []
    before = torch.get_num_threads()
    torch.set_num_threads(len(case.devices))  # one for each worker
    try:
        agree([plain(case.task), contestant])
        gc.collect()
        gc.disable()  # as in a contest
        with case.clocks():
            for number in range(WARM_UP + rounds):
                start = time.perf_counter()
                contestant.step()
                if case.devices[0] != "cpu":
                    torch.cuda.synchronize()
                seconds = time.perf_counter() - start
                assert model.timeline is not None, "it ran"
                if number >= WARM_UP:
                    audits.append(case.audit(model.timeline))
                    steps.append(seconds)
    finally:
        gc.enable()
        model.close()
        torch.set_num_threads(before)
    outside = [1.0 - each.seconds / step for each, step in zip(audits, steps, strict=True)]
    return typical(audits), statistics.median(outside)


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    given = options(
        "bubble_audit",
        __doc__,
        rounds=9,
        argv=argv,
        blocks=8,
        width=256,
        time=128,
        rows=8,
        chunks=8,
        gpu_width=1024,
    )
    torch.manual_seed(0)
    report = Report(
        given,
        "Idle share of each worker in %, and the part of each cause",
        columns=("", "worker", *Row._fields),
    )
    cases = [*on_cpu(given), *(on_gpu(given) if torch.cuda.is_available() else ())]
    for case in cases:
        found, outside = run(case, given.rounds)
        for w, row in enumerate(found.rows):
            report.rows.append((case.name, str(w), *map(_percent, row)))
        report.notes.append(reading(case.name, found, outside))
    report.notes += NOTES + (GPU_NOTES if torch.cuda.is_available() else [])
    report.publish()


def reading(name: str, found: Audit, outside: float) -> str:
    """What the rows of a case say, in two sentences."""
    row, workers = found.all, len(found.rows)
    most, share = max(zip(PARTS[1:], row[2:7], strict=True), key=lambda part: part[1])
    return (
        f"{name}: {1e3 * found.seconds:.2f} ms in both halves, and {_percent(outside)} % of the "
        f"step outside. Of {workers} workers {workers * (1.0 - row.idle):.2f} compute at a time; "
        f"idle beyond the schedule is {_percent(row.idle - row.schedule)} %, most by {most} "
        f"({_percent(share)} %)."
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


NOTES = [
    "schedule to transfers add up to idle. Each has what follows from the cause on other workers "
    "in it; the last columns say where it is felt: within, waiting inside the worker's own "
    "actions; between, the next action could begin and has not.",
    "queue: what threads waited for a core within actions, lock: for anything else there. "
    "transfers: whatever goes on between actions, waiting for a core or the lock there included.",
    "Tiny layers are little but Python, which one thread at a time can run: of 4 workers hardly "
    "more than one computes, so they are idle for some 75 % however they hand over. Whether that "
    "shows as lock, as queue (for the core of the thread that gave the lock), as transfers or as "
    "unequal actions is chance; compare the length of the halves with that on one thread.",
    "Outside of the halves are the loss, cutting and merging the mini-batch, and starting workers "
    "and waiting for them: no worker's idle time here.",
]
if not ACCOUNTED:
    NOTES.append("queue: this kernel keeps no account of it, so that it is in lock.")
GPU_NOTES = [
    "GPU: by the CUDA events of its stream, correct to some 10 µs. It is taken to compute all the "
    "time between the events of an action, so its idle time is at least so long; that it waits "
    "there for the host to launch a kernel is not seen. It does not where its 1 thread needs less "
    "time for both halves than the GPU.",
    "GPU, threads: the time of the host. Stages that share a GPU have no bubble on it; and the "
    "lock cannot be told from waiting for the driver to launch a kernel.",
]


if __name__ == "__main__":
    main()
