"""fairscale 0.4.13's Pipe, a later torchgpipe, from the package index.

Like torchgpipe it has one worker for each *different* device, and backward runs on the caller's
thread. Its workers live as long as the Pipe does, and a Pipe that still exists when Python exits
waits for them for ever: so it is deleted here at the end of a ``with`` block.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from benchmarks.contestants.task import Task
from benchmarks.harness import Contestant, competitor


@contextmanager
def fairscale(
    task: Task,
    balance: Sequence[int],
    *,
    chunks: int,
    mode: str,
    devices: Sequence[str],
    name: str = "fairscale",
    threads: int | None = None,
) -> Iterator[Contestant]:
    """The same stages and micro-batches under fairscale's Pipe, for the duration of the block."""
    pipes: list[nn.Module] = []

    @competitor("fairscale")
    def entered(*, name: str) -> Contestant:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it was written for PyTorch 1.12, and is deprecated
            from fairscale.nn import Pipe

            pipe = Pipe(
                task.copy_of_module(),
                list(balance),
                devices=list(devices),
                chunks=chunks,
                checkpoint=mode,
            )
        pipes.append(pipe)
        # Its layers are those of the plain module in the same order.
        parameters = list(pipe.parameters())
        return task.contestant(name, lambda x: pipes[0](x), parameters, threads=threads)

    try:
        yield entered(name=name)
    finally:
        pipes.clear()
