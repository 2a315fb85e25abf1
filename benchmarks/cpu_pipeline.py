"""Claim: on CPU, two stages on two cores run as fast as this machine lets two threads run.

A pipeline of two equal stages cannot be twice as fast as one thread: there is the bubble, and two
busy cores share caches, memory and clock. So next to the plain module on one thread stands the
*measured limit*: the two halves of the model run all their micro-batches at the same time, on two
threads with nothing to wait for, and that time is multiplied by (m + 1) / m for the bubble. What is
left between the limit and the pipeline is the pipeline's own cost.

All three are measured in one run, in turns, after a check that the pipeline and the plain module
compute the same gradients. Every step is a forward and a backward of one mini-batch; the medians
are compared.

    python benchmarks/cpu_pipeline.py

The ratio limit / pipeline must be at least 0.93 without recomputation.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import threading
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from lightning_gpipe import GPipe

STAGES = 2


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map activations of shape (batch, time, width) to the same shape."""
        b, t, w = x.shape
        qkv = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, w // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, w))
        return x + self.mlp(self.norm2(x))


def step(model: nn.Module, x: Tensor, target: Tensor) -> None:
    """Forward and backward of one mini-batch."""
    model.zero_grad()
    F.mse_loss(model(x), target).backward()


def halves_at_once(halves: list[nn.Module], x: Tensor, target: Tensor, m: int) -> None:
    """Each half runs all m micro-batches on a thread of its own, as if it had all it needs."""

    def run(half: nn.Module) -> None:
        torch.set_num_threads(1)
        half.zero_grad()
        outputs = [half(piece.clone().requires_grad_()) for piece in x.chunk(m)]
        for output, gradient in zip(reversed(outputs), reversed(target.chunk(m)), strict=True):
            output.backward(gradient)

    threads = [threading.Thread(target=run, args=(half,)) for half in halves]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def with_threads(number: int, run: Callable[[], None]) -> Callable[[], float]:
    """``run`` with so many intra-op threads; tells how many seconds it took."""

    def timed() -> float:
        torch.set_num_threads(number)
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    return timed


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--time", type=int, default=128, help="length of the sequences")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--repetitions", type=int, default=15)
    options = parser.parse_args()

    torch.manual_seed(0)
    m = options.chunks
    blocks = [Block(options.width, options.width // 64) for _ in range(options.blocks)]
    plain = nn.Sequential(*blocks)
    balance = [options.blocks // STAGES] * STAGES
    halves: list[nn.Module] = [
        copy.deepcopy(plain[: balance[0]]),
        copy.deepcopy(plain[balance[0] :]),
    ]
    piped = {
        mode: GPipe(
            copy.deepcopy(plain),
            balance,
            devices=["cpu"] * STAGES,
            chunks=m,
            activation_checkpointing=mode,
        )
        for mode in ("never", "except_last", "always")
    }
    shape = (options.batch_size, options.time, options.width)
    x, target = torch.randn(shape), torch.randn(shape)

    step(plain, x, target)
    for model in piped.values():
        step(model, x, target)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-6)

    limit = "two halves at once x (m + 1) / m"
    runs = {
        "plain, one thread": with_threads(1, lambda: step(plain, x, target)),
        "plain, two threads": with_threads(STAGES, lambda: step(plain, x, target)),
        limit: with_threads(STAGES, lambda: halves_at_once(halves, x, target, m)),
    }
    for mode, model in piped.items():
        runs[f"pipeline, {mode}"] = with_threads(
            STAGES,
            lambda model=model: step(model, x, target),  # type: ignore[misc]  # bound now
        )
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repetition in range(options.repetitions + 2):
        for name, run in runs.items():
            seconds = run()
            if repetition >= 2:
                times[name].append(seconds)
    times[limit] = [seconds * (m + 1) / m for seconds in times[limit]]
    for model in piped.values():
        model.close()
    report(times, limit, m)


def report(times: dict[str, list[float]], limit: str, m: int) -> None:
    """Print the medians, and what they are relative to one thread and to the limit."""
    median = {name: statistics.median(values) for name, values in times.items()}
    table = Table(title=f"One step, {STAGES} stages, m = {m}, torch {torch.__version__}")
    for column in ("", "ms, median", "fastest", "slowest", "x one thread", "limit / this"):
        table.add_column(column, justify="left" if not column else "right")
    for name, seconds in median.items():
        table.add_row(
            name,
            f"{1e3 * seconds:.1f}",
            f"{1e3 * min(times[name]):.1f}",
            f"{1e3 * max(times[name]):.1f}",
            f"{median['plain, one thread'] / seconds:.3f}",
            f"{median[limit] / seconds:.3f}",
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
