"""Claim: none; what a backward in two parts costs, for some layers; for information.

The bubble is shorter if the gradients of the weights (W) are computed apart from those of the
inputs (B). Both together should take no longer than a backward at once. What they take beyond that
is Python, for the graph that is walked and the operators that are called again, and the kernels':
for some operators two halves take longer than the whole.

    python -m benchmarks.split_backward

Processor time of one thread, so that other programs matter less; the median over the rounds.
"""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.harness import Report, options
from lightning_gpipe.core.run.backward.leaves import UsedLeaves
from lightning_gpipe.core.run.backward.roots import Graph, root_of, run_backward
from lightning_gpipe.core.run.backward.split import Splits
from lightning_gpipe.core.run.backward.stage_backward import StageBackward

WARM_UP = 3


class PipedModule(NamedTuple):
    """Seconds of one round: of the whole, of B and of W, and of the walk, which is a part of B."""

    whole: float
    inputs: float
    weights: float
    walk: float


def layers(size: int) -> list[tuple[str, nn.Module, Tensor]]:
    """The layers and their inputs; ``size`` 1 is that of the published figures."""

    def encoder(width: int) -> nn.Module:
        return nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)

    wide, narrow, channels = 512 // size, 256 // size, 64 // size
    twice = nn.Sequential(nn.Linear(wide, wide), nn.GELU(), nn.Linear(wide, wide))
    convolutions = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
    tiny = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    return [
        (f"encoder layer, width {wide}", encoder(wide), torch.randn(4, 128, wide)),
        (f"encoder layer, width {narrow}", encoder(narrow), torch.randn(4, 128, narrow)),
        (f"two linear layers, width {wide}", twice, torch.randn(256, wide)),
        ("two convolutions", nn.Sequential(*convolutions), torch.randn(8, channels, 32, 32)),
        ("four linear layers, width 16", tiny, torch.randn(4, 16)),
    ]


def measured(layer: nn.Module, x: Tensor, splits: Splits) -> PipedModule:
    """One round."""
    clock, x = time.thread_time, x.requires_grad_()
    roots, gradients = run(layer, x)
    start = clock()
    run_backward(roots, gradients)
    whole = clock() - start
    roots, gradients = run(layer, x)
    backward = StageBackward(UsedLeaves(()), splits)
    start = clock()
    backward.run(0, [x], roots, gradients)
    between = clock()
    backward.run_weights(0)
    end = clock()
    roots, _ = run(layer, x)
    again = clock()
    Graph.behind([root for root in roots if root is not None], [x])
    return PipedModule(whole, between - start, end - between, clock() - again)


def run(layer: nn.Module, x: Tensor):
    """Where a backward of the layer starts, and the gradients there."""
    y = layer(x)
    return [root_of(y)], [torch.ones_like(y)]


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    given = options("split_backward", __doc__, rounds=30, argv=argv, size=1)
    torch.manual_seed(0)
    columns = ("", "whole, ms", "B / whole", "W / whole", "walk, µs")
    report = Report(given, "Backward of one micro-batch, one thread", columns)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name, layer, x in layers(given.size):
            splits = Splits()
            rounds = [measured(layer, x, splits) for _ in range(WARM_UP + given.rounds)]
            found = PipedModule(*map(statistics.median, zip(*rounds[WARM_UP:], strict=True)))
            whole = found.whole or float("nan")
            shares = [f"{seconds / whole:.2f}" for seconds in (found.inputs, found.weights)]
            report.rows.append((name, f"{1e3 * whole:.2f}", *shares, f"{1e6 * found.walk:.0f}"))
    finally:
        torch.set_num_threads(before)
    report.publish()


if __name__ == "__main__":
    main()
