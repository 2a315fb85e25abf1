"""Claim: with one stage and one chunk a step of the Trainer takes 1.03 times plain Lightning's.

With one stage on one device a pipeline gains nothing, so its cost can be measured. The same
LightningModule, a language model of the size of ``make demo``, is fitted by a Trainer without a
strategy and by one with ``GPipeStrategy([k], chunks=1)``. The fits do one batch each, in turns, and
all of it is timed: from the end of one batch to the end of the next, with data, hooks and
optimizer. Each runs on a thread of its own; the time to wake it does not count. They are started
several times, in a drawn order, since where in memory a model has its tensors changes its time by
some per cent, and the rounds count as those of one contest.

For information, the same with recomputation, against ``torch.utils.checkpoint`` around all layers;
a ``GPipe`` of these layers as a module of plain Lightning, to tell what the strategy adds to the
engine; the same model on a batch of an eighth of the characters; and a nearly empty model, to show
the cost alone.

    python -m benchmarks.trainer_overhead
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks.harness import Report, Times, agree, contest, in_one, options, ratio
from benchmarks.harness.fits import fitting, for_ever, quiet
from benchmarks.models.transformer import transformer
from lightning_gpipe import GPipe, GPipeStrategy

CHARACTERS = 100
AT_MOST = 1.03
AGREEING = 3  # batches before any is timed; weights that differ would show in the later gradients

Batch = tuple[Tensor, Tensor]


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    given = options(
        "trainer_overhead",
        __doc__,
        rounds=10,
        argv=argv,
        starts=4,
        blocks=4,
        width=128,
        time=128,
        batch_size=32,
        threads=1,
    )
    torch.manual_seed(0)
    model, tiny = language_model(given.blocks, given.width), language_model(0, 8)
    batch, part = characters(given.batch_size, given.time), characters(4, given.time)
    report = Report(given, f"One batch of the Trainer, {given.threads} intra-op threads")
    for name, layers, data, rounds in (
        ("demo", model, batch, given.rounds),
        ("an eighth", model, part, given.rounds),
        ("tiny", tiny, part, 3 * given.rounds),
    ):
        with quiet():
            times = in_one(
                timed(name, layers, data, rounds, given.threads, start)
                for start in range(given.starts)
            )
        report.times(times)
        ours, plain = f"{name}, ours", f"{name}, plain Lightning"
        at_most = AT_MOST if name == "demo" else None
        report.target(f"{ours} / plain Lightning", ratio(times, ours, plain), at_most=at_most)
        engine = f"{name}, GPipe in plain Lightning"
        report.target(f"{ours} / GPipe in plain Lightning", ratio(times, ours, engine))
        found = ratio(times, f"{ours}, always", f"{name}, torch.utils.checkpoint")
        report.target(f"{ours}, always / torch.utils.checkpoint", found)
        more = times[ours].median - times[plain].median
        report.notes.append(f"{name}: a step takes {1e3 * more:.2f} ms more than plain.")
    report.publish()


def characters(rows: int, time: int) -> Batch:
    """Texts of so many random characters, and the same one character further."""
    codes = torch.randint(CHARACTERS, (rows, time + 1))
    return codes[:, :-1], codes[:, 1:]


def language_model(blocks: int, width: int) -> nn.Sequential:
    """Layers from codes of characters (batch, time) to scores (batch, time, CHARACTERS)."""
    return nn.Sequential(
        nn.Embedding(CHARACTERS, width),
        *transformer(blocks, width),
        nn.LayerNorm(width),
        nn.Linear(width, CHARACTERS),
    )


def timed(
    name: str, layers: nn.Sequential, batch: Batch, rounds: int, threads: int, start: int
) -> dict[str, Times]:
    """Time the ways to fit the layers, in one start."""

    def ours(**more: Any) -> GPipeStrategy:
        return GPipeStrategy([len(layers)], chunks=1, module="layers", **more)

    def engine() -> GPipe:
        return GPipe(copy.deepcopy(layers), [len(layers)], devices=["cpu"])

    def plain() -> nn.Sequential:
        return copy.deepcopy(layers)

    ways: dict[str, tuple[Callable[[], nn.Module], Strategy | str, bool]] = {
        "plain Lightning": (plain, "auto", False),
        "ours": (plain, ours(), False),
        "GPipe in plain Lightning": (engine, "auto", False),
        "torch.utils.checkpoint": (plain, "auto", True),
        "ours, always": (plain, ours(activation_checkpointing="always"), False),
    }
    with ExitStack() as stack:
        contestants = []
        for way in random.Random(start).sample(list(ways), len(ways)):
            layers_of, strategy, recomputed = ways[way]
            model = LanguageModel(layers_of(), batch, recomputed=recomputed)
            fit = stack.enter_context(fitting(model, strategy, threads))
            contestants.append(fit.contestant(f"{name}, {way}"))
        for _ in range(AGREEING):
            agree(contestants)
        times = contest(contestants, rounds=rounds, warm_up=5, seed=start)
    return {name: times[name] for name in (f"{name}, {way}" for way in ways)}


class LanguageModel(L.LightningModule):
    """Learns one and the same batch over and over."""

    def __init__(self, layers: nn.Module, batch: Batch, *, recomputed: bool) -> None:
        super().__init__()
        self.layers = layers
        self.batch = batch
        self.recomputed = recomputed

    @override
    def training_step(self, batch: Batch) -> Tensor:
        x, y = batch
        if self.recomputed:
            scores = checkpoint(self.layers, x, use_reentrant=False)
        else:
            scores = self.layers(x)
        loss = F.cross_entropy(scores.flatten(0, 1), y.flatten())
        self.log("loss", loss)
        return loss

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    @override
    def train_dataloader(self) -> DataLoader[Batch]:
        return for_ever(self.batch)


if __name__ == "__main__":
    main()
