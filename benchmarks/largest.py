"""The largest U-Net that a device holds, a part of :mod:`benchmarks.memory`.

torchgpipe published that where U-Net (6, 72) trains without a pipeline, on batches of 32 images of
192 x 192, one stage with recomputation and 32 chunks trains (11, 128), with 6.1 times as many
parameters. Both need memory for weights, gradients, the batch, and what else is alive at the peak
of a step; SGD has no state. On a GPU with enough memory it is measured. Elsewhere it is counted at
full size on fake tensors, which take no memory.

Beside it stands 1F1B: with a loss for each micro-batch one of them is alive at a time, so nothing
need be recomputed. The last row is the widest (11, C) that would fit. More stages on one device
would need more: each keeps its inputs of all 32 micro-batches.
"""

from __future__ import annotations

import gc
import warnings
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cache, partial
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from benchmarks.contestants.plain import mean_square
from benchmarks.harness import Options, Report
from benchmarks.harness.allocations import Counting, peak_bytes
from benchmarks.models import unet
from lightning_gpipe import GPipe

PLAIN, LARGER = (6, 72), (11, 128)
WIDTHS = range(128, 142, 2)  # weights and gradients of the widest alone are as much as PLAIN needs

Step = Callable[[Tensor, Tensor], None]  # a forward and a backward of a mini-batch and its target
Wrap = Callable[[nn.Sequential, str], Step]


def largest_model(given: Options, report: Report) -> None:
    """Report which U-Nets train in the memory that PLAIN needs without a pipeline."""
    batch, side = given.large_batch, given.large_side
    need, how = need_counted, "counted"
    if torch.cuda.is_available() and torch.cuda.mem_get_info()[0] > 24 * 2**30:
        need, how = need_on_gpu, "measured"
    one_stage = partial(in_stages, balance=None, chunks=batch)
    budget = _reported(report, PLAIN, f"plain, {how}", need(*PLAIN, batch, side, alone))
    needed = _reported(report, LARGER, f"ours, {how}", need(*LARGER, batch, side, one_stage))
    times = parameters(*LARGER) / parameters(*PLAIN)
    report.target(
        f"parameters: ours {LARGER} / plain {PLAIN}, in {needed / budget:.3f} of its memory, {how}",
        times if needed <= budget else 0.0,
        at_least=6.1,
    )
    alternating = need(*LARGER, batch, side, partial(by_micro_batch, chunks=batch))
    _reported(report, LARGER, f"ours, 1F1B, nothing recomputed, {how}", alternating)
    report.target(f"{LARGER}, 1F1B, nothing recomputed / ours, {how}", alternating / needed)
    budget = need_counted(*PLAIN, batch, side, alone)
    if widest := widest_within(budget, batch, side):
        size = (LARGER[0], widest)
        needed = need_counted(*size, batch, side, one_stage)
        _reported(report, size, "ours, counted", needed)
        report.target(
            f"the same of the widest, {size}, in {needed / budget:.3f} of its memory, counted",
            parameters(*size) / parameters(*PLAIN),
        )


def alone(module: nn.Module, device: str) -> Step:
    """Train without a pipeline."""

    def step(x: Tensor, target: Tensor) -> None:
        mean_square(module(x), target).backward()

    return step


def in_stages(
    module: nn.Sequential, device: str, *, balance: Sequence[int] | None, chunks: int
) -> Step:
    """Train with a pipeline on one device, recomputing; without a balance in one stage."""
    balance = [len(module)] if balance is None else balance
    return alone(
        GPipe(module, balance, devices=[device], chunks=chunks, activation_checkpointing="always"),
        device,
    )


def by_micro_batch(module: nn.Sequential, device: str, *, chunks: int) -> Step:
    """Train in one stage, under 1F1B and without recomputation."""
    balance = [len(module)]
    pipeline = GPipe(
        module, balance, devices=[device], chunks=chunks, activation_checkpointing="never"
    )

    def loss_of(batch: tuple[Tensor, Tensor]) -> Tensor:
        x, target = batch
        return mean_square(pipeline(x), target)

    def step(x: Tensor, target: Tensor) -> None:
        loss = pipeline.by_micro_batch(loss_of, (x, target), schedule="1f1b").loss
        assert loss is not None, "every micro-batch has one"
        # All gradients are there; they are scaled by a number, which fake tensors do not have.
        if not isinstance(x, FakeTensor):
            loss.backward()

    return step


def need_counted(blocks: int, channels: int, batch: int, side: int, wrap: Wrap) -> int:
    """Weights, batch, and the peak of a step, in bytes, on fake tensors."""
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        module = unet(blocks, channels)
        x, target = torch.empty(batch, 3, side, side), torch.empty(batch, 1, side, side)
        with mock.patch.object(nn.Module, "to", lambda self, device: self):  # they cannot move
            step = wrap(module, "cpu")
        with Counting([*module.parameters(), x, target]) as counting:
            step(x, target)
    return counting.peak


def need_on_gpu(blocks: int, channels: int, batch: int, side: int, wrap: Wrap) -> int:
    """The same, measured."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    with torch.device("cuda"):
        module = unet(blocks, channels)
        x, target = torch.randn(batch, 3, side, side), torch.randn(batch, 1, side, side)
    step = wrap(module, "cuda")
    beside = torch.cuda.memory_allocated() - before
    return beside + peak_bytes(partial(step, x, target), clear=module.zero_grad, device="cuda")


def widest_within(budget: int, batch: int, side: int) -> int | None:
    """The most of WIDTHS channels that need no more than the budget, of the depth of LARGER."""
    two = partial(in_stages, balance=None, chunks=2)  # the peak is that of one micro-batch
    image = side * side * 4 * 4  # bytes: three channels, and one of the target

    def need(channels: int) -> int:
        return need_counted(LARGER[0], channels, 2, side, two) + (batch - 2) * 2 * image

    fitting = bisect_right(WIDTHS, budget, key=need)
    return WIDTHS[fitting - 1] if fitting else None


def _reported(report: Report, size: tuple[int, int], how: str, need: int) -> int:
    count = parameters(*size)
    cells = (mib(need), mib(need - 8 * count), f"{count:,}")
    report.rows.append((f"U-Net {size}, {how}", *cells))
    return need


def mib(size: int) -> str:
    """A size in MiB, as a report has it."""
    return f"{size / 2**20:,.1f}"


@cache
def parameters(blocks: int, channels: int) -> int:
    """The number of parameters of a U-Net."""
    with torch.device("meta"):
        return sum(each.numel() for each in unet(blocks, channels).parameters())
