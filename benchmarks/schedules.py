"""Claim: a schedule takes the time that its table says, on the real engine.

Layers that sleep take a known time, and no cores: forward, the gradients of the inputs (B) and
those of the weights (W) equally long. So what is measured is the schedule, and what the engine adds
to it. Four stages, eight micro-batches; where stages are looped, interleaved or folded (V), eight
of half the size, two on each device. No activations are recomputed.

    python -m benchmarks.schedules

All compute the same gradients, which is checked first. The simulation has no target: it is what
the table of the schedule says. With ``--layers linear``, layers that compute: their W and B take
about as long, but two cores are not four devices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import Function

from benchmarks.contestants.plain import mean_square
from benchmarks.contestants.task import Task, stepping
from benchmarks.harness import Contestant, Report, agree, contest, options, ratio
from lightning_gpipe import GPipe
from lightning_gpipe.core.schedules import SCHEDULES, Action, ByMicroBatch, Kind, Schedule

N = 4
BASE = "fill-drain"


class Way(NamedTuple):
    """A schedule, and what its time must be at most, relative to fill-drain's.

    Attributes:
        name: As the report has it.
        looped: Whether each device has two stages, of half the size.
        schedule: Of a loss for each micro-batch; None for the loss of the mini-batch.
        split: Whether backwards are split.
        at_most: The target.
    """

    name: str
    looped: bool = False
    schedule: ByMicroBatch | None = None
    split: bool = False
    at_most: float | None = None


WAYS = (
    Way(BASE),
    Way("fill-drain, W", split=True, at_most=0.96),
    Way("looped fill-drain", looped=True),
    Way("looped fill-drain, W", looped=True, split=True),
    Way("1F1B", schedule="1f1b", at_most=1.03),
    Way("1F1B, W", schedule="1f1b", split=True),
    Way("interleaved", looped=True, schedule="1f1b", at_most=0.95),
    Way("interleaved, W", looped=True, schedule="1f1b", split=True),
    Way("zero bubble", schedule="zero_bubble", at_most=0.84),
    Way("zero bubble, V", looped=True, schedule="zero_bubble_v"),
    Way("V-Half", looped=True, schedule="v_half", at_most=1.1),
    Way("V-Min", looped=True, schedule="v_min", at_most=1.6),
)


class _Asleep(Function):
    """Takes some time in forward, and some in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return gradient, None, None


class Sleeping(nn.Module):
    """A layer whose F, B and W take equally long.

    Args:
        width: The number of its weights, which it adds to its input.
        seconds: How long each takes.
    """

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        moved: Tensor = _Asleep.apply(x, self.seconds, self.seconds)
        weight: Tensor = _Asleep.apply(self.weight, 0.0, self.seconds)
        return torch.tanh(moved) + weight


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    given = options(
        "schedules",
        __doc__,
        rounds=5,
        argv=argv,
        chunks=8,
        milliseconds=20.0,
        layers="sleeping",
        width=8,
    )
    torch.manual_seed(0)
    seconds, width, m = given.milliseconds / 1e3 / 2, given.width, given.chunks
    layers: list[nn.Module] = [Sleeping(width, seconds) for _ in range(2 * N)]
    if given.layers == "linear":
        layers = [nn.Linear(width, width) for _ in range(2 * N)]
    x = torch.randn(m * 4, width)
    task = Task(nn.Sequential(*layers), x, torch.randn_like(x), mean_square)

    title = f"One step, {N} devices, m = {m}, {given.layers} layers"
    report = Report(given, title, ("", "ms, median", "quartiles", "simulated / fill-drain"))
    with ExitStack() as stack:
        made = [(way, *stack.enter_context(running(way, task, N, m))) for way in WAYS]
        contestants = [contestant for _, contestant, _ in made]
        agree(contestants)
        times = contest(contestants, rounds=given.rounds)
        schedules = {way.name: schedule_of() for way, _, schedule_of in made}
    report.times(times, relative(schedules))
    for way in WAYS[1:]:
        bound = way.at_most if given.layers == "sleeping" else None
        report.target(f"{way.name} / {BASE}", ratio(times, way.name, BASE), at_most=bound)
    report.publish()


@contextmanager
def running(
    way: Way, task: Task, devices: int, m: int
) -> Iterator[tuple[Contestant, Callable[[], Schedule]]]:
    """A contestant, and what knows the schedule that it ran."""
    module, stages = task.copy_of_module(), devices * (1 + way.looped)
    pipeline = GPipe(
        module,
        [len(module) // stages] * stages,
        devices=["cpu"] * devices,
        chunks=m,
        activation_checkpointing="never",
        split_backward=way.split,
        folded=way.schedule is not None and SCHEDULES[way.schedule].folded,
        threads=True,
    )
    parameters = list(pipeline.parameters())

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        loss_of(task.x, task.target).backward()

    def loss_of(x: Tensor, target: Tensor) -> Tensor:
        if way.schedule is None:
            return task.loss(pipeline(x), target)
        outcome = pipeline.by_micro_batch(
            lambda batch: task.loss(pipeline(batch[0]), batch[1]),
            (x, target),
            schedule=way.schedule,
        )
        assert outcome.loss is not None, "every micro-batch has one"
        return outcome.loss

    def schedule_of() -> Schedule:
        assert pipeline.timeline is not None, "it has run"
        return pipeline.timeline.schedule

    try:
        yield stepping(way.name, step, parameters), schedule_of
    finally:
        pipeline.close()


def relative(schedules: Mapping[str, Schedule]) -> dict[str, str]:
    """How long each takes in the simulation, relative to fill-drain."""
    lengths = {name: simulated(schedule) for name, schedule in schedules.items()}
    return {name: f"{each / lengths[BASE]:.3f}" for name, each in lengths.items()}


def simulated(schedule: Schedule) -> float:
    """How long it takes in the simulation, where each device has as much to do in all of them."""
    size = schedule.workers / schedule.n
    whole = 1.0 if schedule.split else 2.0

    def cost(action: Action) -> float:
        if action.by_caller:
            return 0.0
        return size * (whole if action.kind is Kind.BACKWARD else 1.0)

    return schedule.simulate(cost).makespan


if __name__ == "__main__":
    main()
