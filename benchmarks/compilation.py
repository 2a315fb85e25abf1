"""Claim: what was compiled once is not compiled again, whatever the sizes of the micro-batches.

And, for information, what compiling brings and what it costs. Two models are fitted on two devices:
many blocks of small operators, and transformer blocks. Each fit does one batch, in turns, with the
layers as they are, with ``GPipeStrategy(compile=True)``, which compiles them one by one, and with
each stage's layers in one layer, which that compiles as one graph. The rows of batches alternate,
and are no multiple of the number of chunks.

The first batch is timed in new processes: one with an empty cache of the compiler, a cold start,
and one with the cache of that one, a warm start.

    python -m benchmarks.compilation
    python -m benchmarks.compilation --threads auto

The code of the CPU shows what launching operators one by one costs. On a GPU the same is the time
of the host, for as long as kernels are small.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks.harness import Options, Report, agree, contest, options, ratio
from benchmarks.harness.fits import Fit, fitting, for_ever, quiet
from benchmarks.models.transformer import Block
from lightning_gpipe import GPipeStrategy

AS_IT_IS, LAYERS, STAGES = WAYS = ("as it is", "layers compiled", "stages compiled")


class OneLayer(nn.Sequential):
    """A nested Sequential whose layers do not count one by one, as it has a forward."""

    @override
    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = super().forward(input)
        return output


class Gated(nn.Module):
    """A block of many small operators."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """Map activations of any shape that ends with the width to the same shape."""
        h = F.gelu(self.linear(self.norm(x)))
        return x + 0.5 * h * torch.sigmoid(h * self.scale + self.shift)


class Model(L.LightningModule):
    """Layers, and the batches that they learn over and over."""

    def __init__(self, layers: nn.Sequential, batches: Sequence[Tensor]) -> None:
        super().__init__()
        self.layers = layers
        self.batches = batches

    @override
    def training_step(self, batch: Tensor) -> Tensor:
        return self.layers(batch).square().mean()

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    @override
    def train_dataloader(self) -> DataLoader[Tensor]:
        return for_ever(*self.batches)


Blocks = Callable[[Options], tuple[list[nn.Module], list[Tensor]]]


def small_operators(given: Options) -> tuple[list[nn.Module], list[Tensor]]:
    """Blocks of small operators, and batches of two sizes."""
    blocks = [Gated(given.width) for _ in range(given.small_blocks)]
    return [*blocks], [torch.randn(rows, given.width) for rows in _sizes(given)]


def transformer(given: Options) -> tuple[list[nn.Module], list[Tensor]]:
    """Transformer blocks, and batches of two sizes."""
    blocks = [Block(2 * given.width, 2) for _ in range(given.blocks)]
    return [*blocks], [torch.randn(rows, given.time, 2 * given.width) for rows in _sizes(given)]


MODELS: Mapping[str, Blocks] = {"small operators": small_operators, "transformer": transformer}


def _sizes(given: Options) -> tuple[int, int]:
    return given.batch_size, given.batch_size - given.chunks - 1


def fit(given: Options, name: str, way: str) -> Any:
    """A fit of one of the models in one of the ways, as a context manager."""
    torch.manual_seed(0)
    blocks, batches = MODELS[name](given)
    half = len(blocks) // 2
    balance = [half, len(blocks) - half]
    if way == STAGES:
        blocks, balance = [OneLayer(*blocks[:half]), OneLayer(*blocks[half:])], [1, 1]
    strategy = GPipeStrategy(
        balance,
        chunks=given.chunks,
        module="layers",
        activation_checkpointing="never",
        compile=way != AS_IT_IS and {"backend": given.backend},
        threads={"true": True, "false": False}.get(given.threads, "auto"),
    )
    model = Model(nn.Sequential(*blocks), batches)
    return fitting(model, strategy, threads=1, devices=2)


def first_batch(given: Options, name: str, way: str) -> float:
    """How many seconds the first batch takes, in a new process."""
    with quiet(), fit(given, name, way) as begun:
        return begun.step()


def starts(given: Options, name: str, way: str, cache: str) -> list[float]:
    """The seconds of the first batch: with an empty cache of the compiler, and with a full one."""
    found = []
    with patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=cache):
        for _ in range(2):
            spawning = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(1, mp_context=spawning) as process:
                found.append(process.submit(first_batch, given, name, way).result())
    return found


def graphs() -> int:
    """How many graphs were compiled so far."""
    return counters["stats"]["unique_graphs"]


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    given = options(
        "compilation",
        __doc__,
        rounds=60,
        argv=argv,
        small_blocks=16,
        blocks=4,
        width=64,
        time=32,
        batch_size=32,
        chunks=4,
        threads="true",
        backend="inductor",
    )
    report = Report(
        given,
        f"One batch of the Trainer, two devices, m = {given.chunks}, threads={given.threads}",
        columns=("", "ms, median", "quartiles", "first batch, s: cold", "warm"),
    )
    for name in MODELS:
        compare(given, report, name)
    report.publish()


def compare(given: Options, report: Report, name: str) -> None:
    """One of the models in all ways."""
    with tempfile.TemporaryDirectory() as cache:
        taken = {way: starts(given, name, way, f"{cache}/{k}") for k, way in enumerate(WAYS)}
    with ExitStack() as stack:
        stack.enter_context(quiet())
        fits: list[Fit] = [stack.enter_context(fit(given, name, way)) for way in WAYS]
        for each in fits:
            each.step()
        before = graphs()
        contestants = [one.contestant(way) for one, way in zip(fits, WAYS, strict=True)]
        agree(contestants)
        times = contest(contestants, rounds=given.rounds, warm_up=10)
        again = graphs() - before
    cold, warm = ({way: f"{each[k]:.1f}" for way, each in taken.items()} for k in (0, 1))
    rows = {way: f"{name}, {way}" for way in WAYS}
    named = [{rows[way]: each[way] for way in WAYS} for each in (cold, warm)]
    report.times({rows[way]: times[way] for way in WAYS}, *named)
    report.target(f"{name}: graphs that were compiled after the first batch", again, at_most=0)
    for one, other in ((LAYERS, AS_IT_IS), (STAGES, AS_IT_IS), (STAGES, LAYERS)):
        report.target(f"{name}: {one} / {other}", ratio(times, one, other))
    for way in (LAYERS, STAGES):
        report.target(f"{name}: {way}, warm start / cold", taken[way][1] / taken[way][0])


if __name__ == "__main__":
    main()
