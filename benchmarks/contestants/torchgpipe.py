"""torchgpipe 0.0.7, the first GPipe for PyTorch, from the package index.

It has one worker for each *different* device, so stages on one CPU run on one of its threads, and
backward runs on the caller's thread: it uses two cores by intra-op threads only.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from benchmarks.contestants.skips import with_skips_of
from benchmarks.contestants.task import Task
from benchmarks.harness import Contestant, competitor


@competitor("torchgpipe")
def torchgpipe(
    task: Task,
    balance: Sequence[int],
    *,
    chunks: int,
    mode: str,
    devices: Sequence[str],
    name: str = "torchgpipe",
    threads: int | None = None,
) -> Contestant:
    """The same stages and micro-batches under torchgpipe."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it was written for PyTorch 1.8
        from torchgpipe import GPipe, skip

        model = GPipe(
            with_skips_of(skip, task.copy_of_module()),
            list(balance),
            devices=list(devices),
            chunks=chunks,
            checkpoint=mode,
        )
    # Its layers are those of the plain module in the same order.
    return task.contestant(name, model, list(model.parameters()), threads=threads)
