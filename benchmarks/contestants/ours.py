"""This project's pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from benchmarks.contestants.task import Task
from benchmarks.harness import Contestant
from lightning_gpipe import GPipe
from lightning_gpipe.core.plan import ActivationCheckpointing


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
) -> Iterator[Contestant]:
    """A pipeline for the duration of a ``with`` block."""
    model = GPipe(
        task.copy_of_module(),
        balance,
        devices=devices,
        chunks=chunks,
        activation_checkpointing=mode,
    )
    try:
        yield task.contestant(name, model, list(model.parameters()), threads=threads)
    finally:
        model.close()
