"""Claim: the front-ends for other modules add at most 3 % to a step of 50 ms.

The same transformer blocks run as an nn.Sequential, as an nn.ModuleList over which a forward loops,
and in a module whose forward is traced. The pipeline is the same, so the difference is what a
front-end and its program add. Each is measured with the hidden states alone, and with a mask and a
pair of position embeddings beside them, which a forward gives to each block and an nn.Sequential
hands from block to block in a tuple.

What is added does not depend on how much the blocks compute. So it is measured with small blocks,
where it is not lost in the noise: the median over the rounds of the difference, and its share of a
step of 50 ms. Everything runs on one thread, where nothing that is added can hide behind another
worker, and the claim is about processor time, which a busy machine lengthens less than time.

    python -m benchmarks.frontends
    python -m benchmarks.frontends --width 64 --time 64 --batch-size 16  # steps of some 50 ms

For information: the ratios of the whole steps, the same by time, and with recomputation.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.contestants.plain import mean_square
from benchmarks.contestants.task import stepping
from benchmarks.harness import Contestant, Options, Report, Times, agree, contest, options, ratio
from benchmarks.models.transformer import Block
from lightning_gpipe import GPipe
from lightning_gpipe.core.schedules import ActivationCheckpointing

AT_MOST, STEP = 1.03, 0.050  # seconds
HEADS = 4

Positions = tuple[Tensor, Tensor]


class Conditioned(Block):
    """A block with what most transformers give to theirs; either may be missing."""

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: Positions | None = None,
    ) -> Tensor:
        """Map activations of shape (batch, time, width) to the same shape."""
        if position_embeddings is not None:
            cos, sin = position_embeddings
            x = x * cos + x.flip(-1) * sin
        y = super().forward(x)
        return y if attention_mask is None else y * attention_mask


class Handing(nn.Module):
    """A block in an nn.Sequential, where what is beside the hidden states goes along in a tuple."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, given: Any) -> Any:
        """Map what the block is called with to what the next one is called with."""
        x, mask, cos, sin = given
        return self.block(x, mask, (cos, sin)), mask, cos, sin


class Model(nn.Module):
    """A forward that calls the blocks one after another.

    Args:
        blocks: The module that holds them.
    """

    def __init__(self, blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
    ) -> Tensor:
        """Map activations of shape (batch, time, width) to the same shape."""
        for block in self.blocks.children():
            if attention_mask is None:
                x = block(x)
            else:
                x = block(x, attention_mask=attention_mask, position_embeddings=(cos, sin))
        return x


class Holder(nn.Module):
    """Modules under names, in no container that a pipeline would look for."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        for k, module in enumerate(modules):
            self.add_module(f"block{k}", module)


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    given = options(
        "frontends",
        __doc__,
        rounds=40,
        argv=argv,
        stages=4,
        blocks=12,
        width=8,
        time=4,
        batch_size=8,
        chunks=4,
    )
    report = Report(
        given,
        f"One step, {given.blocks} blocks in {given.stages} stages on one device, one thread, "
        f"m = {given.chunks}",
        columns=("", "ms, median", "quartiles", "added µs per block"),
    )
    hidden, *others = inputs_of(given)
    for title, inputs in (("hidden states", [hidden]), ("with arguments", [hidden, *others])):
        compare(given, report, inputs, "never", title, time.process_time, AT_MOST)
        compare(given, report, inputs, "never", f"{title}, time", time.perf_counter)
        compare(given, report, inputs, "always", f"{title}, always", time.process_time)
    report.publish()


def compare(
    given: Options,
    report: Report,
    inputs: Sequence[Tensor],
    mode: ActivationCheckpointing,
    title: str,
    clock: Callable[[], float],
    at_most: float | None = None,
) -> None:
    """The blocks behind each front-end, beside those of an nn.Sequential."""
    torch.manual_seed(0)
    blocks = [Conditioned(given.width, HEADS) for _ in range(given.blocks)]
    sequential = nn.Sequential(*(map(Handing, blocks) if inputs[1:] else blocks))
    with ExitStack() as stack:

        def contestant(
            name: str, module: nn.Module, balance: Sequence[int] | Sequence[str], path: str = ""
        ) -> Contestant:
            model = GPipe(
                copy.deepcopy(module),
                balance,
                module=path or None,
                devices=["cpu"],
                chunks=given.chunks,
                activation_checkpointing=mode,
            )
            stack.callback(model.close)
            return stepping_with(model, given_to(module, inputs), f"{name}, {title}", clock)

        each = given.blocks // given.stages
        counts, starts = [each] * given.stages, range(each, given.blocks, each)
        reference = contestant("nn.Sequential", sequential, counts)
        looped = contestant("nn.ModuleList", Model(nn.ModuleList(blocks)), counts, "blocks")
        names = [f"blocks.block{k}" for k in starts]
        traced = contestant("traced", Model(Holder(blocks)), names)
        contestants = [reference, looped, traced]
        agree(contestants)
        times = contest(contestants, rounds=given.rounds)
    added = {each.name: differences(times, each.name, reference.name) for each in contestants}
    report.times(times, {name: f"{1e6 * x / given.blocks:.0f}" for name, x in added.items()})
    for one in contestants[1:]:
        share = 1 + added[one.name] / STEP
        report.target(f"{one.name}: a step of 50 ms", share, at_most=at_most)
        report.target(f"{one.name} / nn.Sequential", ratio(times, one.name, reference.name))


def differences(times: Mapping[str, Times], one: str, other: str) -> float:
    """How much longer one takes than another: the median over the rounds, in seconds."""
    rounds = zip(times[one].seconds, times[other].seconds, strict=True)
    return statistics.median(a - b for a, b in rounds)


def stepping_with(
    model: GPipe, inputs: Sequence[Any], name: str, clock: Callable[[], float]
) -> Contestant:
    """Who steps with a pipeline, and times it by a clock."""
    parameters = list(model.parameters())

    def step() -> float:
        start = clock()
        for parameter in parameters:
            parameter.grad = None
        output = model(*inputs)
        y = output if isinstance(output, Tensor) else output[0]
        mean_square(y, torch.zeros_like(y)).backward()
        return clock() - start

    return stepping(name, step, parameters, threads=1)


def given_to(module: nn.Module, inputs: Sequence[Tensor]) -> Sequence[Any]:
    """The arguments of a module: an nn.Sequential has one."""
    return (tuple(inputs),) if isinstance(module, nn.Sequential) and inputs[1:] else inputs


def inputs_of(given: Options) -> list[Tensor]:
    """The hidden states, a mask, and a pair of position embeddings."""
    torch.manual_seed(1)
    rows = (given.batch_size, given.time)
    mask = (torch.rand(*rows, 1) > 0.1).float()
    angles = torch.rand(*rows, given.width)
    return [torch.randn(*rows, given.width), mask, angles.cos(), angles.sin()]


if __name__ == "__main__":
    main()
