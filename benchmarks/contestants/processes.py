"""Contestants that run as several processes of torch.distributed, over Gloo.

The processes wait on a pipe for the command to do a step, and use no processor until then. The time
is from when the first of them begins until the last of them is done, without the time of sending
the command. The clock is that of the machine, the same in all processes. Garbage is collected
between the steps.
"""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import tempfile
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from itertools import accumulate
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.harness import Contestant

START, STEP, STOP = 120.0, 120.0, 10.0  # seconds that a process may take for it


class Orders(NamedTuple):
    """What a process can be told to do.

    Attributes:
        step: A step, from gradients of None.
        gradients: Tells those that it left in this process.
    """

    step: Callable[[], object]
    gradients: Callable[[], Sequence[Tensor]]


class Role(ABC):
    """What one process has to do; pickled to get there.

    Attributes:
        threads: The number of intra-op threads.
        untimed: How many steps it does before each that is timed: where a step is short, processes
            that have slept are slow in their first.
    """

    threads: int
    untimed: int

    @abstractmethod
    def prepare(self, rank: int, world_size: int) -> Orders:
        """Prepare, in the process."""


@contextmanager
def in_processes(roles: Sequence[Role], name: str) -> Iterator[Contestant]:
    """A process for each role, for the duration of a ``with`` block.

    Args:
        roles: The roles, by rank.
        name: As the report has it.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        processes = stack.enter_context(_processes(roles, f"{folder}/store"))

        def step() -> float:
            spans = processes.all("step")
            return max(end for _, end in spans) - min(start for start, _ in spans)

        def gradients() -> list[Tensor]:
            step()
            found = processes.all("gradients")
            return [torch.from_numpy(gradient) for own in found for gradient in own]

        yield Contestant(name, step, gradients)


def in_order_of_stages(
    contestant: Contestant, stages: Sequence[nn.Module], ranks: Sequence[int]
) -> Contestant:
    """The contestant with gradients in the order of the stages; they come process by process.

    Args:
        contestant: The contestant.
        stages: The stages.
        ranks: The process of each.
    """
    counts = [len(list(stage.parameters())) for stage in stages]
    begins = [0, *accumulate(counts)]
    own = sorted(range(len(stages)), key=lambda j: ranks[j])  # each process's, in their order
    came = [begins[j] + k for j in own for k in range(counts[j])]

    def gradients() -> list[Tensor]:
        pairs = zip(came, contestant.gradients(), strict=True)
        return [gradient for _, gradient in sorted(pairs, key=itemgetter(0))]

    return replace(contestant, gradients=gradients)


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
def _processes(roles: Sequence[Role], store: str) -> Iterator[Processes]:
    # Not forked: each has its own places in memory, which change how long it computes.
    context = multiprocessing.get_context("spawn")
    started: list[BaseProcess] = []
    pipes: list[Connection] = []
    processes = Processes(started, pipes)
    try:
        for rank, role in enumerate(roles):
            mine, its = context.Pipe()
            # Pickled here, or the tensors would share their memory with those of the others.
            arguments = (pickle.dumps(role), rank, len(roles), store, its)
            name = f"benchmark-rank-{rank}"
            process = context.Process(target=_serve, args=arguments, name=name, daemon=True)
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
        role: Role = pickle.loads(pickled)
        torch.set_num_threads(role.threads)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=STEP / 2),
        )
        prepared = role.prepare(rank, world_size)
        orders: dict[str, Callable[[], object]] = {
            "step": lambda: _timed(prepared.step, role.untimed),
            "gradients": lambda: [gradient.numpy() for gradient in prepared.gradients()],
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


def _timed(step: Callable[[], object], untimed: int) -> tuple[float, float]:
    """When a step began and ended."""
    for _ in range(untimed):
        step()
    dist.barrier()  # all begin at once
    start = time.perf_counter()
    step()
    end = time.perf_counter()
    gc.collect()
    return start, end
