"""Balances as functions: lists of ints, to print, edit and write into a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_gpipe.core.data import MicroBatching
from lightning_gpipe.core.pipeline.balancing import balances_for
from lightning_gpipe.core.pipeline.measuring import Measuring
from lightning_gpipe.core.pipeline.pipeline import check_settings
from lightning_gpipe.core.pipeline.sampling import entries_with
from lightning_gpipe.core.pipeline.taken import Taken
from lightning_gpipe.core.pipeline.taking import take
from lightning_gpipe.core.plan import ActivationCheckpointing
from lightning_gpipe.core.profile import Optimizers


def balance_by_time(
    model: nn.Module,
    stages: int,
    sample: Any,
    *,
    module: str | None = None,
    device: str | torch.device = "cpu",
    chunks: int = 1,
    activation_checkpointing: ActivationCheckpointing = "except_last",
    microbatching: MicroBatching | None = None,
    optimizer: Optimizers = None,
    device_memory: float | Sequence[float] | None = None,
) -> list[int]:
    """Balance the layers so that the slowest stage is as fast as possible.

    Each layer is measured by itself, see :func:`~lightning_gpipe.profile`. What is around them does
    not count: it runs before and after, while all stages wait.

    Args:
        model: The model; it may be larger than the device, and stays where it is.
        stages: The number of stages.
        sample: A mini-batch as the model is called with: a tuple of arguments, a dict of named
            ones, or one argument. An nn.Sequential has one argument, which may be a tuple.
        module: The path of what is to run as a pipeline; None takes the model itself.
        device: Where to measure. On ``"meta"``, and for a model on the meta device, operations are
            counted and nothing is computed.
        chunks: The number of micro-batches of a mini-batch.
        activation_checkpointing: Which of them are recomputed.
        microbatching: How a mini-batch is cut.
        optimizer: What counts as optimizer state, where memory is limited: an optimizer, its class,
            or a function that makes one of a list of parameters.
        device_memory: The bytes of each stage's device that its layers must fit, or a list of them;
            None has no limit.

    Returns:
        The number of layers of each stage, first to last.

    Raises:
        TypeError, ValueError: If the model cannot be cut, an argument is wrong, or nothing fits.
        BaseException: What a layer raises that cannot run on the sample, with a note.
    """
    given = _Given(
        device, chunks, activation_checkpointing, microbatching, optimizer, device_memory
    )
    return _balance("time", take(model, module), stages, sample, given)


def balance_by_memory(
    model: nn.Module,
    stages: int,
    sample: Any,
    *,
    module: str | None = None,
    device: str | torch.device = "cpu",
    chunks: int = 1,
    activation_checkpointing: ActivationCheckpointing = "except_last",
    microbatching: MicroBatching | None = None,
    optimizer: Optimizers = None,
    device_memory: float | Sequence[float] | None = None,
) -> list[int]:
    """Balance the layers so that the largest stage needs as little memory as possible.

    What counts are parameters, gradients, optimizer state, buffers, and at the peak of a mini-batch
    what is saved for backward; on the last device also what is around the layers.

    Args:
        model, stages, sample, module, device, chunks, microbatching: As for
            :func:`balance_by_time`.
        activation_checkpointing: Which of the micro-batches are recomputed, and save nothing.
        optimizer: What counts as optimizer state; None counts none.
        device_memory: As for :func:`balance_by_time`.

    Returns:
        The number of layers of each stage, first to last.

    Raises:
        TypeError, ValueError, BaseException: As :func:`balance_by_time`.
    """
    given = _Given(
        device, chunks, activation_checkpointing, microbatching, optimizer, device_memory
    )
    return _balance("memory", take(model, module), stages, sample, given)


class _Given(NamedTuple):
    """How to measure, as the user gave it."""

    device: str | torch.device
    chunks: int
    activation_checkpointing: ActivationCheckpointing
    microbatching: MicroBatching | None
    optimizer: Optimizers
    device_memory: float | Sequence[float] | None


def _balance(by: str, taken: Taken, stages: int, sample: Any, given: _Given) -> list[int]:
    check_settings(given.chunks, given.activation_checkpointing, given.microbatching)
    measuring = Measuring(
        [taken],
        partial(entries_with, [taken], sample),
        [given.device] * stages,
        chunks=given.chunks,
        activation_checkpointing=given.activation_checkpointing,
        microbatching=given.microbatching,
        optimizer=given.optimizer,
        memory=_memory_of_each(given.device_memory, stages),
    )
    return list(balances_for([taken], [by], measuring, "last")[0])


def _memory_of_each(device_memory: float | Sequence[float] | None, stages: int) -> Sequence[float]:
    if device_memory is None:
        return ()
    if isinstance(device_memory, float | int):
        return [device_memory] * stages
    if len(device_memory) != stages:
        raise ValueError(
            "device_memory must have the bytes of each stage's device, or be one number for all: "
            f"got {len(device_memory)} for {stages} stages."
        )
    return device_memory
