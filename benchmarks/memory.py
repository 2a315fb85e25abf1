"""Claim: a step needs no more memory than torchgpipe's; a device holds a model 6.1 times larger.

Both are about U-Nets as torchgpipe measures them.

*The peak of a step* is the most bytes that forward and backward have allocated at once, beyond the
weights, with gradients that are None before, after one step to warm up; on CPU by the profiler's
allocation events of all threads. Four stages, ``always``. The peak without the gradients, which all
need, is shown beside it. In torchgpipe stages on one CPU share one thread, so it is compared with
ours on one device; with four threads, four stages of ours work at the same time, as on four
devices. A narrower model shows the other values of ``activation_checkpointing`` and the plain
module.

*The largest model*: torchgpipe published that where U-Net (6, 72) trains without a pipeline, on
batches of 32 images of 192 x 192, one stage with recomputation and 32 chunks trains (11, 128), with
6.1 times as many parameters. Both need memory for weights, gradients, the batch, and what else is
alive at the peak of a step; SGD has no state. On a GPU with enough memory it is measured. Elsewhere
it is counted at full size on fake tensors, which take no memory; the narrower model shows how far
the count is from the measurement. The last row is the widest (11, C) that would fit. More stages on
one device would need more: each keeps its inputs of all 32 micro-batches.

    python -m benchmarks.memory
"""

from __future__ import annotations

import gc
import math
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.contestants.ours import ours
from benchmarks.contestants.plain import mean_square, plain
from benchmarks.contestants.task import Task
from benchmarks.contestants.torchgpipe import torchgpipe
from benchmarks.harness import Contestant, Options, Report, agree, options
from benchmarks.harness.allocations import Counting, peak_bytes
from benchmarks.models import unet
from lightning_gpipe import GPipe
from lightning_gpipe.core.plan import ActivationCheckpointing

BLOCKS, BALANCE = 5, [30, 66, 84, 61]  # torchgpipe's for U-Net (5, C)
PLAIN, LARGER = (6, 72), (11, 128)
MODES: tuple[ActivationCheckpointing, ...] = ("always", "except_last", "never")
WIDTHS = range(128, 142, 2)  # weights and gradients of the widest alone are as much as PLAIN needs

Forward = Callable[[Tensor], Tensor]
Wrap = Callable[[nn.Sequential, str], Forward]


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
    largest_model(given, report, measured)
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
    gradients = 4 * _parameters(BLOCKS, channels)
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
        cells = ("not installed", "") if peak is None else (_mib(peak), _mib(peak - gradients))
        report.rows.append((f"U-Net ({BLOCKS}, {channels}), {name}", *cells, ""))
    return peaks


# The largest model.


def largest_model(given: Options, report: Report, measured: dict[str, int]) -> None:
    """Report which U-Nets train in the memory that PLAIN needs without a pipeline."""
    batch, side = given.large_batch, given.large_side
    need, how = need_counted, "counted"
    if torch.cuda.is_available() and torch.cuda.mem_get_info()[0] > 24 * 2**30:
        need, how = need_on_gpu, "measured"
    one_stage = partial(in_stages, balance=None, chunks=batch)
    budget = _reported(report, PLAIN, f"plain, {how}", need(*PLAIN, batch, side, alone))
    needed = _reported(report, LARGER, f"ours, {how}", need(*LARGER, batch, side, one_stage))
    times = _parameters(*LARGER) / _parameters(*PLAIN)
    report.target(
        f"parameters: ours {LARGER} / plain {PLAIN}, in {needed / budget:.3f} of its memory, {how}",
        times if needed <= budget else 0.0,
        at_least=6.1,
    )
    budget = need_counted(*PLAIN, batch, side, alone)
    if widest := widest_within(budget, batch, side):
        size = (LARGER[0], widest)
        needed = need_counted(*size, batch, side, one_stage)
        _reported(report, size, "ours, counted", needed)
        report.target(
            f"the same of the widest, {size}, in {needed / budget:.3f} of its memory, counted",
            _parameters(*size) / _parameters(*PLAIN),
        )
    report.notes += errors_of_counting(given, measured)


def alone(module: nn.Sequential, device: str) -> Forward:
    """Train without a pipeline."""
    return module


def in_stages(
    module: nn.Sequential, device: str, *, balance: Sequence[int] | None, chunks: int
) -> Forward:
    """Train with a pipeline on one device; without a balance in one stage."""
    balance = [len(module)] if balance is None else balance
    return GPipe(
        module, balance, devices=[device], chunks=chunks, activation_checkpointing="always"
    )


def need_counted(blocks: int, channels: int, batch: int, side: int, wrap: Wrap) -> int:
    """Weights, batch, and the peak of a step, in bytes, on fake tensors."""
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        module = unet(blocks, channels)
        x, target = torch.empty(batch, 3, side, side), torch.empty(batch, 1, side, side)
        with mock.patch.object(nn.Module, "to", lambda self, device: self):  # they cannot move
            forward = wrap(module, "cpu")
        with Counting([*module.parameters(), x, target]) as counting:
            mean_square(forward(x), target).backward()
    return counting.peak


def need_on_gpu(blocks: int, channels: int, batch: int, side: int, wrap: Wrap) -> int:
    """The same, measured."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    with torch.device("cuda"):
        module = unet(blocks, channels)
        x, target = torch.randn(batch, 3, side, side), torch.randn(batch, 1, side, side)
    forward = wrap(module, "cuda")
    beside = torch.cuda.memory_allocated() - before

    def step() -> None:
        mean_square(forward(x), target).backward()

    return beside + peak_bytes(step, clear=module.zero_grad, device="cuda")


def widest_within(budget: int, batch: int, side: int) -> int | None:
    """The most of WIDTHS channels that need no more than the budget, of the depth of LARGER."""
    two = partial(in_stages, balance=None, chunks=2)  # the peak is that of one micro-batch
    image = side * side * 4 * 4  # bytes: three channels, and one of the target

    def need(channels: int) -> int:
        return need_counted(LARGER[0], channels, 2, side, two) + (batch - 2) * 2 * image

    fitting = bisect_right(WIDTHS, budget, key=need)
    return WIDTHS[fitting - 1] if fitting else None


def errors_of_counting(given: Options, measured: Mapping[str, int]) -> Iterator[str]:
    """How far counting is from what was measured of the narrow model."""
    batch, side = given.batch_size, given.side
    beside = 4 * (_parameters(BLOCKS, given.narrow) + batch * side * side * 4)
    pipelined = partial(in_stages, balance=BALANCE, chunks=given.chunks)
    for start, wrap in (("plain", alone), ("ours, one device", pipelined)):
        name = next(name for name in measured if name.startswith(start))
        counted = need_counted(BLOCKS, given.narrow, batch, side, wrap)
        found = counted / (beside + measured[name])
        yield f"{name}: counting finds {found:.3f} of what is measured, weights and batch included."


def _reported(report: Report, size: tuple[int, int], how: str, need: int) -> int:
    parameters = _parameters(*size)
    cells = (_mib(need), _mib(need - 8 * parameters), f"{parameters:,}")
    report.rows.append((f"U-Net {size}, {how}", *cells))
    return need


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f}"


@cache
def _parameters(blocks: int, channels: int) -> int:
    with torch.device("meta"):
        return sum(each.numel() for each in unet(blocks, channels).parameters())


if __name__ == "__main__":
    main()
