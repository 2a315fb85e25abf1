"""torch.distributed.pipelining: one process for each device, over Gloo.

It is configured to be fast: it is given the shapes between the stages, which it otherwise infers by
running the layers on uninitialised memory, and collects no outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from typing_extensions import override

from benchmarks.contestants.processes import Orders, Role, in_order_of_stages, in_processes
from benchmarks.contestants.task import Loss, Task
from benchmarks.harness import Contestant

Schedule = type[PipelineScheduleSingle] | type[PipelineScheduleMulti]


class Slice(NamedTuple):
    """One stage.

    Attributes:
        j: Its place among all.
        module: Its layers.
        input: A micro-batch that goes in; its values are of no interest.
        output: The same for what comes out.
    """

    j: int
    module: nn.Module
    input: Tensor
    output: Tensor


@dataclass
class Part(Role):
    """One process.

    Attributes:
        stages: Its stages, in order.
        count: The number of all stages.
        x: The mini-batch, if it has the first stage.
        target: Its target, if it has the last.
        loss: Of the output and the target.
        chunks: The number of micro-batches.
        schedule: The class of theirs that says what is done when.
        untimed, threads: See :class:`~benchmarks.contestants.processes.Role`.
    """

    stages: list[Slice]
    count: int
    x: Tensor | None
    target: Tensor | None
    loss: Loss
    chunks: int
    schedule: Schedule
    untimed: int
    threads: int

    @override
    def prepare(self, rank: int, world_size: int) -> Orders:
        device = torch.device("cpu")
        stages = [
            PipelineStage(
                each.module,
                each.j,
                self.count,
                device,
                input_args=each.input,
                output_args=each.output,
            )
            for each in self.stages
        ]
        several = issubclass(self.schedule, PipelineScheduleMulti)
        given: Any = stages if several else stages[0]
        # They divide the gradients by the number of micro-batches: the losses are means.
        schedule = self.schedule(given, self.chunks, loss_fn=self.loss)
        inputs = () if self.x is None else (self.x,)
        parameters = [p for each in self.stages for p in each.module.parameters()]

        def step() -> None:
            for parameter in parameters:
                parameter.grad = None
            schedule.step(*inputs, target=self.target, return_outputs=False)

        return Orders(step, lambda: [p.grad for p in parameters if p.grad is not None])


@contextmanager
def pipelining(
    task: Task,
    balance: Sequence[int],
    *,
    chunks: int,
    schedule: Schedule = ScheduleGPipe,
    ranks: Sequence[int] | None = None,
    untimed: int = 0,
    name: str = "torch.distributed.pipelining",
    threads: int = 1,
) -> Iterator[Contestant]:
    """A process for each device, for the duration of a ``with`` block.

    Args:
        task: What to do.
        balance: The number of layers in each stage.
        chunks: The number of micro-batches; they must be equally large.
        schedule: The class of theirs that says what is done when.
        ranks: The process of each stage; one for each by default.
        untimed: How many steps they do before each that is timed.
        name: As the report has it.
        threads: The number of intra-op threads in each process.
    """
    ranks = range(len(balance)) if ranks is None else ranks
    stages = _cut(task, balance, chunks)
    own = [[each for each in stages if ranks[each.j] == rank] for rank in sorted({*ranks})]
    parts = [
        Part(
            stages=each,
            count=len(stages),
            x=task.x if each[0].j == 0 else None,
            target=task.target if each[-1].j == len(stages) - 1 else None,
            loss=task.loss,
            chunks=chunks,
            schedule=schedule,
            untimed=untimed,
            threads=threads,
        )
        for each in own
    ]
    with in_processes(parts, name) as contestant:
        yield in_order_of_stages(contestant, [each.module for each in stages], ranks)


def _cut(task: Task, balance: Sequence[int], chunks: int) -> list[Slice]:
    """The stages, with the shapes between them."""
    assert len(task.x) % chunks == 0, "all micro-batches have the shape of the first"
    module, found, done = task.copy_of_module(), list[Slice](), 0
    x = task.x.chunk(chunks)[0].clone()
    for j, size in enumerate(balance):
        stage = module[done : done + size]
        y = stage(x).detach().requires_grad_()
        found.append(Slice(j, stage, x, y))
        x, done = y, done + size
    return found
