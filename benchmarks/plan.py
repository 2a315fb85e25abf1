"""Claim: a plan says what a mini-batch takes, and what each stage keeps for its backward.

Three models, in two stages, run with three numbers of micro-batches, with and without
recomputation. The layers are measured one by one, once for each number of micro-batches. The
predicted time of forward and backward stands beside the median of what they take by the timeline.
The predicted bytes, those that autograd saves and the inputs of stages, stand beside the most that
each stage was seen to keep at once; of the two stages the ratio that is further from 1 counts.

Times of two stages on two cores need a machine that nobody else uses.

    python -m benchmarks.plan
    python -m benchmarks.plan --models charlm --rounds 9

Predicted / measured must be between 0.85 and 1.15 for times, and between 0.90 and 1.10 for bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Literal

import torch
from torch import Tensor

from benchmarks.balance import MODELS
from benchmarks.harness import Report, options
from benchmarks.harness.keeping import kept
from lightning_gpipe import GPipe, Place, plan
from lightning_gpipe.core.plan import Prediction, plan_for
from lightning_gpipe.core.run import Observation

CHUNKS = (1, 2, 4)
MODES: tuple[Literal["never", "always"], ...] = ("never", "always")


def step(pipeline: GPipe, x: Tensor) -> float:
    """A mini-batch, forward and backward; the seconds in the pipeline, by its timeline."""
    pipeline.zero_grad()
    pipeline(x).square().mean().backward()
    assert pipeline.timeline is not None, "a mini-batch has run"
    seen = Observation.of(pipeline.timeline)
    assert seen is not None, "it had a backward"
    return seen.length


def compare(name: str, report: Report, rounds: int) -> None:
    """Add what was found for one model."""
    torch.manual_seed(0)
    each = MODELS[name]()
    for chunks in CHUNKS:
        costs = plan(each.model, each.x, 2, module=each.path, chunks=chunks).prediction.profile
        for mode in MODES:
            predicted = plan_for(
                costs, [Place()] * 2, stages=2, chunks=chunks, activation_checkpointing=mode
            ).prediction
            pipeline = GPipe(
                each.model,
                list(predicted.settings.balance),
                module=each.path,
                devices=["cpu"] * 2,
                chunks=chunks,
                activation_checkpointing=mode,
                threads=True,
            )
            step(pipeline, each.x)
            taken = [step(pipeline, each.x) for _ in range(rounds)]
            found = kept(pipeline, [each.x], partial(step, pipeline, each.x))
            pipeline.close()
            pipeline.release()
            add(report, f"{name}, chunks={chunks}, {mode}", predicted, median(taken), found.stages)


def add(
    report: Report, title: str, predicted: Prediction, taken: float, kept: Sequence[int]
) -> None:
    """Add a row, and its ratios."""
    planned = [stage.memory.activations + stage.memory.boundaries for stage in predicted.stages]
    report.rows.append(
        (
            title,
            f"{1e3 * predicted.time:.0f}",
            f"{1e3 * taken:.0f}",
            ", ".join(f"{each / 2**20:.1f}" for each in planned),
            ", ".join(f"{each / 2**20:.1f}" for each in kept),
        )
    )
    report.target(f"{title}: time", predicted.time / taken, at_least=0.85, at_most=1.15)
    ratios = [one / other for one, other in zip(planned, kept, strict=True)]
    worst = max(ratios, key=lambda ratio: abs(ratio - 1))
    report.target(f"{title}: bytes kept", worst, at_least=0.9, at_most=1.1)


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    given = options("plan", __doc__, rounds=5, argv=argv, models="charlm,llama,resnet101")
    torch.set_num_threads(2)  # the two stages share them
    report = Report(
        given,
        "What a plan predicts of a mini-batch in two stages, and what was measured",
        columns=("", "ms, plan", "ms", "MiB kept, plan", "MiB kept"),
    )
    for name in given.models.split(","):
        compare(name, report, given.rounds)
    report.publish()


if __name__ == "__main__":
    main()
