"""torch.distributed.pipelining: one process for each stage, over Gloo.

It is configured to be fast: it is given the shapes between the stages, which it otherwise infers by
running the layers on uninitialised memory, and collects no outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from typing_extensions import override

from benchmarks.contestants.processes import Orders, Role, in_processes
from benchmarks.contestants.task import Loss, Task
from benchmarks.harness import Contestant


@dataclass
class Part(Role):
    """One stage.

    Attributes:
        module: Its layers.
        input: A micro-batch that goes in; its values are of no interest.
        output: The same for what comes out.
        x: The mini-batch, in the first stage.
        target: Its target, in the last.
        loss: Of the output and the target.
        chunks: The number of micro-batches.
        schedule: The class of theirs that says what is done when.
        untimed, threads: See :class:`~benchmarks.contestants.processes.Role`.
    """

    module: nn.Module
    input: Tensor
    output: Tensor
    x: Tensor | None
    target: Tensor | None
    loss: Loss
    chunks: int
    schedule: type[PipelineScheduleSingle]
    untimed: int
    threads: int

    @override
    def prepare(self, rank: int, world_size: int) -> Orders:
        stage = PipelineStage(
            self.module,
            rank,
            world_size,
            torch.device("cpu"),
            input_args=self.input,
            output_args=self.output,
        )
        # They divide the gradients by the number of micro-batches: the losses are means.
        schedule = self.schedule(stage, self.chunks, loss_fn=self.loss)
        inputs = () if self.x is None else (self.x,)
        parameters = list(self.module.parameters())

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
    schedule: type[PipelineScheduleSingle] = ScheduleGPipe,
    untimed: int = 0,
    name: str = "torch.distributed.pipelining",
    threads: int = 1,
) -> Iterator[Contestant]:
    """A process for each stage, for the duration of a ``with`` block.

    Args:
        task: What to do.
        balance: The number of layers in each stage.
        chunks: The number of micro-batches; they must be equally large.
        schedule: The class of theirs that says what is done when.
        untimed: How many steps they do before each that is timed.
        name: As the report has it.
        threads: The number of intra-op threads in each process.
    """
    parts = _cut(task, balance, chunks=chunks, schedule=schedule, untimed=untimed, threads=threads)
    with in_processes(parts, name) as contestant:
        yield contestant


def _cut(task: Task, balance: Sequence[int], *, chunks: int, **common: Any) -> list[Part]:
    """The stages, with the shapes between them."""
    assert len(task.x) % chunks == 0, "all micro-batches have the shape of the first"
    module, parts, done = task.copy_of_module(), [], 0
    x = task.x.chunk(chunks)[0].clone()
    for j, size in enumerate(balance):
        stage = module[done : done + size]
        y = stage(x).detach().requires_grad_()
        part = Part(
            module=stage,
            input=x,
            output=y,
            x=task.x if j == 0 else None,
            target=task.target if j == len(balance) - 1 else None,
            loss=task.loss,
            chunks=chunks,
            **common,
        )
        parts.append(part)
        x, done = y, done + size
    return parts
