"""This project's pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from benchmarks.contestants.processes import Orders, Role, in_order_of_stages, in_processes
from benchmarks.contestants.task import Task, stepping
from benchmarks.harness import Contestant
from lightning_gpipe import GPipe
from lightning_gpipe.core.schedules import ActivationCheckpointing, ByMicroBatch
from lightning_gpipe.core.transport import OutputElsewhere


@contextmanager
def ours(
    task: Task,
    balance: Sequence[int],
    *,
    chunks: int,
    mode: ActivationCheckpointing,
    devices: Sequence[str],
    name: str = "lightning-gpipe",
    threads: int | None = None,
    on_threads: bool | Literal["auto"] = True,
    cores: int | None = None,
    schedule: ByMicroBatch | None = None,
) -> Iterator[Contestant]:
    """A pipeline for the duration of a ``with`` block, each worker ``on_threads`` of its own.

    With a ``schedule`` the loss is that of each micro-batch.
    """
    model = GPipe(
        task.copy_of_module(),
        balance,
        devices=devices,
        chunks=chunks,
        activation_checkpointing=mode,
        threads=on_threads,
        cores=cores,
    )
    try:
        yield training(model, task, name, schedule, threads=threads)
    finally:
        model.close()


def training(
    model: GPipe,
    task: Task,
    name: str,
    schedule: ByMicroBatch | None,
    *,
    threads: int | None,
    at_last: bool = False,
) -> Contestant:
    """Steps of a pipeline; with a ``schedule`` the loss is that of each micro-batch."""
    loss_of = _loss_at_last if at_last else _loss
    parameters = list(model.parameters())

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        loss_of(model, task, schedule).backward()

    return stepping(name, step, parameters, threads=threads)


def _loss(model: GPipe, task: Task, schedule: ByMicroBatch | None) -> Tensor:
    """The loss of the mini-batch; with a ``schedule`` its backwards have run already."""
    if schedule is None:
        return task.loss(model(task.x), task.target)
    loss = model.by_micro_batch(
        lambda batch: task.loss(model(batch[0]), batch[1]),
        (task.x, task.target),
        schedule=schedule,
    ).loss
    assert loss is not None, "every micro-batch has one"
    return loss


def _loss_at_last(model: GPipe, task: Task, schedule: ByMicroBatch | None) -> Tensor:
    """The same where the last stage is; elsewhere what runs the backward of the stages there."""
    with model.only.engine.outputs_at_last() as step, suppress(OutputElsewhere):
        return _loss(model, task, schedule)
    assert step.zero is not None, "a backward runs in each process"
    return step.zero


@dataclass
class Rank(Role):
    """One process of a pipeline over several.

    Attributes:
        task: What all of them do.
        balance, chunks, mode: Arguments of the pipeline.
        owners: The process of each worker.
        schedule: One with a loss for each micro-batch, or None.
        folded: Whether each process has two stages, one of them on the way back.
        at_last: Whether only the process of the last stage gets the outputs, and computes losses.
        untimed, threads: See :class:`~benchmarks.contestants.processes.Role`.
    """

    task: Task
    balance: Sequence[int]
    chunks: int
    mode: ActivationCheckpointing
    owners: Sequence[int]
    schedule: ByMicroBatch | None
    untimed: int
    threads: int
    folded: bool = False
    at_last: bool = False

    @override
    def prepare(self, rank: int, world_size: int) -> Orders:
        torch.manual_seed(0)  # the processes must draw the same
        model = GPipe(
            self.task.module,
            self.balance,
            devices=["cpu"] * len(self.owners),
            chunks=self.chunks,
            activation_checkpointing=self.mode,
            owners=self.owners,
            folded=self.folded,
        )
        contestant = training(
            model, self.task, "", self.schedule, threads=None, at_last=self.at_last
        )
        parameters = list(model.parameters())
        return Orders(contestant.step, lambda: [p.grad for p in parameters if p.grad is not None])


@contextmanager
def ours_in_processes(
    task: Task,
    balance: Sequence[int],
    *,
    chunks: int,
    mode: ActivationCheckpointing,
    owners: Sequence[int],
    schedule: ByMicroBatch | None = None,
    untimed: int = 0,
    name: str,
    threads: int = 1,
    folded: bool = False,
    at_last: bool = False,
) -> Iterator[Contestant]:
    """A pipeline over several processes, for the duration of a ``with`` block."""
    roles = [
        Rank(task, balance, chunks, mode, owners, schedule, untimed, threads, folded, at_last)
        for _ in {*owners}
    ]
    there = [*owners, *reversed(owners)] if folded else [*owners] * (len(balance) // len(owners))
    ends = zip(balance, accumulate(balance), strict=True)
    stages = [task.module[end - size : end] for size, end in ends]
    with in_processes(roles, name) as contestant:
        yield in_order_of_stages(contestant, stages, there)
