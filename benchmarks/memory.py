"""Claim: a step needs no more memory than torchgpipe's; a device holds a model 6.1 times larger.

Both are about U-Nets as torchgpipe measures them.

*The peak of a step* is the most bytes that forward and backward have allocated at once, beyond the
weights, with gradients that are None before, after one step to warm up; on CPU by the profiler's
allocation events of all threads. Four stages, ``always``. The peak without the gradients, which all
need, is shown beside it. In torchgpipe stages on one CPU share one thread, so it is compared with
ours on one device; with four threads, four stages of ours work at the same time, as on four
devices. A narrower model shows the other values of ``activation_checkpointing`` and the plain
module.

*The largest model* is that of :mod:`benchmarks.largest`, measured or counted; the narrower model
shows how far the count is from the measurement.

    python -m benchmarks.memory
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch

from benchmarks.contestants.ours import ours
from benchmarks.contestants.plain import mean_square, plain
from benchmarks.contestants.task import Task
from benchmarks.contestants.torchgpipe import torchgpipe
from benchmarks.harness import Contestant, Options, Report, agree, options
from benchmarks.harness.allocations import peak_bytes
from benchmarks.largest import alone, in_stages, largest_model, mib, need_counted, parameters
from benchmarks.models import unet
from lightning_gpipe.core.schedules import ActivationCheckpointing

BLOCKS, BALANCE = 5, [30, 66, 84, 61]  # torchgpipe's for U-Net (5, C)
MODES: tuple[ActivationCheckpointing, ...] = ("always", "except_last", "never")


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    given = options(
        "memory",
        __doc__,
        rounds=1,
        argv=argv,
        channels=64,
        narrow=16,
        side=64,
        batch_size=8,
        chunks=8,
        large_side=192,
        large_batch=32,
    )
    report = Report(
        given,
        f"Batches of {given.batch_size} images of {given.side} x {given.side}, "
        f"m = {given.chunks}; at last of {given.large_batch} of {given.large_side} x "
        f"{given.large_side}, m = {given.large_batch}",
        columns=("", "peak, MiB", "besides gradients (and weights)", "parameters"),
    )
    with single_threaded():  # bytes are the same, and small operations are slow on threads
        agree_in_double(small_task(2, given.chunks, 64), given.chunks)
        peaks_of_steps(given, report, given.channels, MODES[:1], narrow=False)
        measured = peaks_of_steps(given, report, given.narrow, MODES, narrow=True)
    largest_model(given, report)
    report.notes += errors_of_counting(given, measured)
    report.publish()


# The peak of a step.


@contextmanager
def single_threaded() -> Iterator[None]:
    """One intra-op thread for the duration of a ``with`` block."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def small_task(channels: int, batch: int, side: int) -> Task:
    """U-Net (BLOCKS, C), which BALANCE is for."""
    torch.manual_seed(0)
    x, target = torch.randn(batch, 3, side, side), torch.randn(batch, 1, side, side)
    return Task(unet(BLOCKS, channels), x, target, mean_square)


def contestants(task: Task, mode: ActivationCheckpointing, chunks: int) -> Iterator[Contestant]:
    """One at a time: torchgpipe, ours on one device, ours with four threads."""
    n = len(BALANCE)
    yield torchgpipe(
        task,
        BALANCE,
        chunks=chunks,
        mode=str(mode),
        devices=["cpu"] * n,
        name=f"torchgpipe, {mode}",
    )
    for devices, where in ((["cpu"], "one device"), (["cpu"] * n, f"{n} threads")):
        name = f"ours, {where}, {mode}"
        with ours(task, BALANCE, chunks=chunks, mode=mode, devices=devices, name=name) as each:
            yield each


def agree_in_double(task: Task, chunks: int) -> None:
    """Raise unless all make the same gradients of a narrow model, in float64 and without dropout.

    To float32 a U-Net this deep is chaos, and where dropout draws no two are the same.
    """
    module = task.module.double().eval()
    task = Task(module, task.x.double(), task.target.double(), task.loss)
    for mode in MODES:
        reference = plain(task)
        for each in contestants(task, mode, chunks):
            agree([reference, each], rtol=1e-6, atol=1e-12)


def peaks_of_steps(
    given: Options,
    report: Report,
    channels: int,
    modes: tuple[ActivationCheckpointing, ...],
    *,
    narrow: bool,
) -> dict[str, int]:
    """Measure and report U-Net (BLOCKS, C) in each mode; the bytes by the contestants' names."""
    task = small_task(channels, given.batch_size, given.side)
    gradients = 4 * parameters(BLOCKS, channels)
    peaks: dict[str, int] = {}

    def measure(each: Contestant) -> str:
        if each.installed:
            peak = peak_bytes(each.step, clear=each.clear)
            peaks[each.name] = max(peak, peaks.get(each.name, 0))
            each.clear()
        return each.name

    names = [measure(plain(task))] if narrow else []
    for mode in modes:
        rounds = [
            [measure(each) for each in contestants(task, mode, given.chunks)]
            for _ in range(given.rounds)
        ]
        theirs, *others = rounds[0]
        names += [theirs, *others]
        for name in others:
            report.target(
                f"U-Net ({BLOCKS}, {channels}), {name} / torchgpipe",
                peaks[name] / peaks.get(theirs, math.nan),
                at_most=None if narrow else 1.0,
            )
    for name in names:
        peak = peaks.get(name)
        cells = ("not installed", "") if peak is None else (mib(peak), mib(peak - gradients))
        report.rows.append((f"U-Net ({BLOCKS}, {channels}), {name}", *cells, ""))
    return peaks


def errors_of_counting(given: Options, measured: Mapping[str, int]) -> Iterator[str]:
    """How far counting is from what was measured of the narrow model."""
    batch, side = given.batch_size, given.side
    beside = 4 * (parameters(BLOCKS, given.narrow) + batch * side * side * 4)
    pipelined = partial(in_stages, balance=BALANCE, chunks=given.chunks)
    for start, wrap in (("plain", alone), ("ours, one device", pipelined)):
        name = next(name for name in measured if name.startswith(start))
        counted = need_counted(BLOCKS, given.narrow, batch, side, wrap)
        found = counted / (beside + measured[name])
        yield f"{name}: counting finds {found:.3f} of what is measured, weights and batch included."


if __name__ == "__main__":
    main()
