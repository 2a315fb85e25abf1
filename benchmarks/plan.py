"""Claim: a plan says what a mini-batch takes, and what each stage keeps for its backward.

Three models, in two stages, run with three numbers of micro-batches, with and without
recomputation. The layers are measured one by one, once for each number of micro-batches. The
predicted time of forward and backward stands beside the median of what they take by the timeline.
The predicted bytes, those that autograd saves and the inputs of stages, stand beside the most that
each stage was seen to keep at once; of the two stages the ratio that is further from 1 counts.

Models whose loss is next to nothing, since nothing is around the layers, run with other schedules
too, and with four micro-batches: what the loss takes is no part of a plan, and comes between the
actions where each micro-batch has its own. Bytes are counted by hooks on what is saved, with which
no backward is split, and by stage, not by device: so there are none for some of these rows.

Times of two stages on two cores need a machine that nobody else uses.

    python -m benchmarks.plan
    python -m benchmarks.plan --models charlm --rounds 9

Predicted / measured must be between 0.85 and 1.15 for times, and between 0.90 and 1.10 for bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from benchmarks.balance import MODELS, Model
from benchmarks.harness import Report, options
from benchmarks.harness.keeping import kept
from lightning_gpipe import GPipe, ModelProfile, Place, plan
from lightning_gpipe.core.balance import solve
from lightning_gpipe.core.planner import Prediction, plan_for
from lightning_gpipe.core.run import Observation
from lightning_gpipe.core.schedules import ScheduleKind

CHUNKS = (1, 2, 4)
MODES: tuple[Literal["never", "always"], ...] = ("never", "always")
OTHERS = (
    ScheduleKind(split=True),
    ScheduleKind("1f1b"),
    ScheduleKind("1f1b", split=True),
    ScheduleKind("zero_bubble", split=True),
)


class Case(NamedTuple):
    """A pipeline that runs as it was predicted.

    Attributes:
        title: As the report has it.
        predicted: What was predicted.
        counted: Whether what stages keep can be counted.
    """

    title: str
    predicted: Prediction
    counted: bool = True


def step(pipeline: GPipe, x: Tensor, order: ScheduleKind) -> float:
    """A mini-batch, forward and backward; the seconds in the pipeline, by its timeline."""
    pipeline.zero_grad()
    if order.schedule == "fill_drain":
        loss = loss_of(pipeline, x)
    else:
        run = partial(pipeline.by_micro_batch, partial(loss_of, pipeline), schedule=order.schedule)
        outcome = run(x).loss
        assert outcome is not None, "every micro-batch has one"
        loss = outcome
    loss.backward()
    assert pipeline.timeline is not None, "a mini-batch has run"
    seen = Observation.of(pipeline.timeline)
    assert seen is not None, "it had a backward"
    return seen.length


def loss_of(pipeline: GPipe, x: Tensor) -> Tensor:
    """The loss of a batch, or of a micro-batch."""
    return pipeline(x).square().mean()


def compare(name: str, report: Report, rounds: int) -> None:
    """Add what was found for one model."""
    torch.manual_seed(0)
    each = MODELS[name]()
    for chunks in CHUNKS:
        last = chunks == CHUNKS[-1] and each.path is None
        costs = plan(each.model, each.x, 2, module=each.path, chunks=chunks).prediction.profile
        for case in cases(name, costs, others=last):
            taken, found = measure(each, case, rounds)
            add(report, case.title, case.predicted, taken, found)


def cases(name: str, costs: ModelProfile, *, others: bool) -> Iterator[Case]:
    """What is predicted of a model with one number of micro-batches."""
    made = partial(plan_for, costs, [Place()] * 2, chunks=costs.chunks)
    title = f"{name}, chunks={costs.chunks}"
    for mode in MODES:
        found = made(stages=2, activation_checkpointing=mode)
        yield Case(f"{title}, {mode}", found.prediction)
    for order in OTHERS if others else ():
        chosen: dict[str, Any] = {"schedule": order.schedule, "split_backward": order.split}
        found = made(stages=2, activation_checkpointing="never", **chosen)
        yield Case(f"{title}, {order}", found.prediction, counted=not order.split)
    if others and len(costs.layers) >= 4:
        balance = solve(costs.times(), 4)
        found = made(balance=balance, activation_checkpointing="never", schedule="1f1b")
        yield Case(f"{title}, interleaved", found.prediction, counted=False)


def measure(each: Model, case: Case, rounds: int) -> tuple[float, list[int] | None]:
    """The seconds of a mini-batch, and the bytes that each stage keeps, if they can be counted."""
    settings = case.predicted.settings
    pipeline = GPipe(
        each.model,
        list(settings.balance),
        module=each.path,
        devices=["cpu"] * 2,
        chunks=settings.chunks,
        activation_checkpointing=settings.activation_checkpointing,
        split_backward=settings.order.split,
        threads=True,
    )
    run = partial(step, pipeline, each.x, settings.order)
    run()
    taken = median(run() for _ in range(rounds))
    found = kept(pipeline, [each.x], run).stages if case.counted else None
    pipeline.close()
    pipeline.release()
    return taken, found


def add(
    report: Report, title: str, predicted: Prediction, taken: float, kept: Sequence[int] | None
) -> None:
    """Add a row, and its ratios."""
    planned = [stage.memory.activations + stage.memory.boundaries for stage in predicted.stages]
    report.rows.append(
        (
            title,
            f"{1e3 * predicted.time:.0f}",
            f"{1e3 * taken:.0f}",
            ", ".join(f"{each / 2**20:.1f}" for each in planned),
            ", ".join(f"{each / 2**20:.1f}" for each in kept or ()),
        )
    )
    report.target(f"{title}: time", predicted.time / taken, at_least=0.85, at_most=1.15)
    if kept is None:
        return
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
