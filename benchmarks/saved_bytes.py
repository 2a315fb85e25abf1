"""Claim: with a loss for each micro-batch, few micro-batches are alive, and few bytes are saved.

Fill-drain keeps the activations of every micro-batch until the loss of the mini-batch, and the
outputs of all of them: of a model with many classes, as a language model's, most of all it keeps.
1F1B keeps n - j micro-batches on stage j of n, and the head and the loss of one.

What is counted is the most that autograd saves, and that enters stages, at once: of an embedding
before the pipeline, four stages, a head of 4,096 classes after it and the cross-entropy, in one
step of 32 micro-batches. Beside it, of how many micro-batches each stage has something saved, and
how much of the bytes the head and the loss save. Parameters, gradients and the batch do not count.
The embedding is frozen in one half of the table and trained in the other: then the caller's graph
before the pipeline lives until backward has come through the stages.

    python -m benchmarks.saved_bytes

All runs on one thread, so what is found does not depend on the machine.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness import Options, Report, options
from benchmarks.harness.keeping import Kept, kept
from lightning_gpipe import GPipe
from lightning_gpipe.core.schedules import SCHEDULES, ActivationCheckpointing, ByMicroBatch

WORDS = 512
BASE = "fill-drain"


class Way(NamedTuple):
    """A schedule, and the megabytes that may be kept at once.

    Attributes:
        name: As the report has it.
        schedule: Of a loss for each micro-batch; None for the loss of the mini-batch.
        mode: What is recomputed.
        split: Whether backwards are split.
        looped: Whether each device has two stages, of half the size.
        at_most: The target.
    """

    name: str
    schedule: ByMicroBatch | None = None
    mode: ActivationCheckpointing = "never"
    split: bool = False
    looped: bool = False
    at_most: float | None = None


WAYS = (
    Way(BASE),
    Way("fill-drain, except_last", mode="except_last"),
    Way("1F1B", "1f1b", at_most=0.4),
    Way("1F1B, W", "1f1b", split=True),
    Way("1F1B, except_last", "1f1b", mode="except_last"),
    Way("interleaved", "1f1b", looped=True),
    Way("zero bubble", "zero_bubble"),
    Way("zero bubble, V", "zero_bubble_v", looped=True),
    Way("V-Half", "v_half", looped=True),
    Way("V-Min", "v_min", looped=True),
)


class Around(nn.Module):
    """What is around the pipeline: an embedding before it, a head after it."""

    def __init__(self, width: int, classes: int, *, trained: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width).requires_grad_(trained)
        self.head = nn.Linear(width, classes)


def main(argv: list[str] | None = None) -> None:
    """Count and print."""
    given = options(
        "saved_bytes",
        __doc__,
        rounds=1,
        argv=argv,
        devices=4,
        chunks=32,
        rows=16,
        width=64,
        classes=4096,
    )
    report = Report(
        given,
        f"One step, {given.devices} devices, m = {given.chunks}, {given.rows} rows in each, "
        f"{given.classes:,} classes",
        columns=("", "micro-batches alive, by stage", "MB of head and loss", "MB in all"),
    )
    for trained in (False, True):
        name = f"embedding {'trained' if trained else 'frozen'}"
        found = {way: counted(given, way, trained=trained) for way in WAYS}
        for way, each in found.items():
            cells = " ".join(map(str, each.alive)), _mb(each.caller), _mb(each.together)
            report.rows.append((f"{name}, {way.name}", *cells))
            if way.at_most is not None:
                claim = f"{name}: MB of {way.name}, of {_mb(found[WAYS[0]].together)} of {BASE}"
                report.target(claim, each.together / 1e6, at_most=way.at_most)
    report.publish()


def counted(given: Options, way: Way, *, trained: bool) -> Kept:
    """What one way keeps in a step."""
    torch.manual_seed(0)
    width, stages = given.width, given.devices * (1 + way.looped)
    blocks = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(2 * given.devices)]
    around = Around(width, given.classes, trained=trained)
    pipeline = GPipe(
        nn.Sequential(*blocks),
        [len(blocks) // stages] * stages,
        devices=["cpu"] * given.devices,
        chunks=given.chunks,
        activation_checkpointing=way.mode,
        split_backward=way.split,
        folded=way.schedule is not None and SCHEDULES[way.schedule].folded,
        threads=False,
    )
    x = torch.randint(WORDS, (given.chunks * given.rows,))
    y = torch.randint(given.classes, x.shape)

    def loss_of(batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.cross_entropy(around.head(pipeline(around.embedding(x))), y)

    def step() -> None:
        if way.schedule is None:
            loss = loss_of((x, y))
        else:
            run = partial(pipeline.by_micro_batch, schedule=way.schedule, around=around)
            outcome = run(loss_of, (x, y)).loss
            assert outcome is not None, "every micro-batch has one"
            loss = outcome
        loss.backward()

    step()
    found = kept(pipeline, [x, y, *around.parameters()], step)
    pipeline.close()
    return found


def _mb(size: int) -> str:
    return f"{size / 1e6:.2f}"


if __name__ == "__main__":
    main()
