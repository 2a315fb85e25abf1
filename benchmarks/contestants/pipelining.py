"""torch.distributed.pipelining: one process for each stage, over Gloo.

Its processes wait on a pipe for the command to do a step, and use no processor until then. Its time
is from when the first of them begins until the last of them is done, without the time of sending
the command. The clock is that of the machine, the same in all processes.

It is configured to be fast: it is given the shapes between the stages, which it otherwise infers by
running the layers on uninitialised memory; it collects no outputs; garbage is collected between its
steps.
"""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from benchmarks.contestants.task import Loss, Task
from benchmarks.harness import Contestant

START, STEP, STOP = 120.0, 120.0, 10.0  # seconds that a process may take for it


class Part(NamedTuple):
    """What one process has to do."""

    module: nn.Module
    input: Tensor
    """A micro-batch that goes in; its values are of no interest."""
    output: Tensor
    """The same for what comes out."""
    x: Tensor | None
    """The mini-batch, in the first stage."""
    target: Tensor | None
    """Its target, in the last."""
    loss: Loss
    chunks: int
    schedule: type[PipelineScheduleSingle]
    untimed: int
    threads: int


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
        untimed: How many steps they do before each that is timed: where a step is short, processes
            that have slept are slow in their first.
        name: As the report has it.
        threads: The number of intra-op threads in each process.
    """
    parts = _cut(task, balance, chunks=chunks, schedule=schedule, untimed=untimed, threads=threads)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        processes = stack.enter_context(_processes(parts, f"{folder}/store"))

        def step() -> float:
            spans = processes.all("step")
            return max(end for _, end in spans) - min(start for start, _ in spans)

        def gradients() -> list[Tensor]:
            step()
            stages = processes.all("gradients")
            return [torch.from_numpy(gradient) for stage in stages for gradient in stage]

        yield Contestant(name, step, gradients)


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


class Processes:
    """Processes that each run a command at the same time, and return the result."""

    def __init__(self, processes: Sequence[BaseProcess], pipes: Sequence[Connection]) -> None:
        self._processes, self._pipes = processes, pipes

    def all(self, order: str) -> list[Any]:
        """Give an order to all, and wait for all their answers.

        Raises:
            RuntimeError: If one fails, with its traceback; if one ends or takes too long.
        """
        for pipe in self._pipes:
            with suppress(BrokenPipeError):  # it ended: there will be no answer
                pipe.send(order)
        return self.answers(STEP)

    def answers(self, seconds: float) -> list[Any]:
        """Wait for an answer of each, at most so long."""
        found: dict[int, Any] = {}
        deadline = time.monotonic() + seconds
        while len(found) < len(self._pipes):
            missing = {pipe: j for j, pipe in enumerate(self._pipes) if j not in found}
            ready = wait(missing, max(0.0, deadline - time.monotonic()))
            if not ready:
                names = [self._processes[j].name for j in missing.values()]
                raise RuntimeError(f"no answer within {seconds:g} s from {', '.join(names)}")
            for pipe in ready:
                j = missing[pipe]  # type: ignore[index]  # the same objects come back
                found[j] = self._answer(j)
        return [found[j] for j in range(len(self._pipes))]

    def _answer(self, j: int) -> Any:
        name = self._processes[j].name
        try:
            failed, answer = self._pipes[j].recv()
        except (EOFError, ConnectionResetError):
            raise RuntimeError(f"{name} ended without an answer") from None
        if failed:
            raise RuntimeError(f"{name} failed:\n{answer}")
        return answer

    def close(self, seconds: float) -> None:
        """End them: within so many seconds by themselves, or else by force."""
        for pipe in self._pipes:
            pipe.close()  # which they take as the end
        deadline = time.monotonic() + seconds
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join(STOP)


@contextmanager
def _processes(parts: Sequence[Part], store: str) -> Iterator[Processes]:
    spawn = multiprocessing.get_context("spawn")
    started: list[BaseProcess] = []
    pipes: list[Connection] = []
    processes = Processes(started, pipes)
    try:
        for j, part in enumerate(parts):
            mine, its = spawn.Pipe()
            # Pickled here, or the tensors would share their memory with those of the others.
            arguments = (pickle.dumps(part), j, len(parts), store, its)
            name = f"pipelining-stage-{j}"
            process = spawn.Process(target=_serve, args=arguments, name=name, daemon=True)
            process.start()
            its.close()
            started.append(process)
            pipes.append(mine)
        processes.answers(START)
        yield processes
    except BaseException:
        processes.close(seconds=0.0)
        raise
    processes.close(STOP)


# In the processes.


def _serve(pickled: bytes, rank: int, world_size: int, store: str, pipe: Connection) -> None:
    """Join the others, then run commands until the pipe is closed."""
    try:
        part: Part = pickle.loads(pickled)
        torch.set_num_threads(part.threads)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=STEP / 2),
        )
        orders: dict[str, Callable[[], object]] = {
            "step": _steps(part, rank, world_size),
            "gradients": partial(_gradients, part.module),
        }
        gc.disable()
        gc.freeze()  # what there is now need not be looked through after each step
        pipe.send((False, None))
        while True:
            try:
                order = pipe.recv()
            except (EOFError, ConnectionResetError):
                break
            pipe.send((False, orders[order]()))
        dist.destroy_process_group()
    except BaseException:
        pipe.send((True, traceback.format_exc()))
        raise SystemExit(1) from None


def _gradients(module: nn.Module) -> list[Any]:
    return [each.grad.numpy() for each in module.parameters() if each.grad is not None]


def _steps(part: Part, rank: int, world_size: int) -> Callable[[], tuple[float, float]]:
    """What does steps from gradients of None, and tells when the last began and ended."""
    stage = PipelineStage(
        part.module,
        rank,
        world_size,
        torch.device("cpu"),
        input_args=part.input,
        output_args=part.output,
    )
    # They divide the gradients by the number of micro-batches: the losses are means.
    schedule = part.schedule(stage, part.chunks, loss_fn=part.loss)
    inputs = () if part.x is None else (part.x,)
    parameters = list(part.module.parameters())

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        schedule.step(*inputs, target=part.target, return_outputs=False)

    def timed() -> tuple[float, float]:
        for _ in range(part.untimed):
            step()
        dist.barrier()  # all begin at once
        start = time.perf_counter()
        step()
        end = time.perf_counter()
        gc.collect()
        return start, end

    return timed
