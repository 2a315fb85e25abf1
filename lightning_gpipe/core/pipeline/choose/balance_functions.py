"""Balances as functions: lists of ints, to print, edit and write into a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lightning_gpipe.core.data import MicroBatching, check_chunks, check_microbatching
from lightning_gpipe.core.pipeline.choose.balancing import balances_for
from lightning_gpipe.core.pipeline.choose.measuring import Measuring
from lightning_gpipe.core.profile import Optimizers
from lightning_gpipe.core.schedules import ActivationCheckpointing, check_activation_checkpointing


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
        model, sample, module, device, chunks, microbatching: See :func:`~lightning_gpipe.profile`.
        stages: The number of stages.
        activation_checkpointing: Which micro-batches are recomputed.
        optimizer: The optimizer whose state counts where memory is limited: an optimizer, its
            class, or a function of a list of parameters that returns one.
        device_memory: The bytes of each stage's device that its layers must fit, or a list of them;
            None has no limit.

    Returns:
        The number of layers of each stage, first to last.

    Raises:
        TypeError, ValueError: If the model cannot be cut, an argument is wrong, or nothing fits.
        BaseException: The error of a layer that cannot run on the sample, with a note.
    """
    return _balance(
        "time",
        model,
        module,
        sample,
        device,
        stages,
        device_memory,
        chunks=chunks,
        activation_checkpointing=activation_checkpointing,
        microbatching=microbatching,
        optimizer=optimizer,
    )


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

    Parameters, gradients, optimizer state and buffers count, and what is saved for backward at the
    peak of a mini-batch; on the last device also what is around the layers.

    Args:
        model, sample, module, device, chunks, microbatching: See :func:`~lightning_gpipe.profile`.
        stages: The number of stages.
        activation_checkpointing: Which of the micro-batches are recomputed, and save nothing.
        optimizer: The optimizer whose state counts; None counts none.
        device_memory: See :func:`balance_by_time`.

    Returns:
        The number of layers of each stage, first to last.

    Raises:
        TypeError, ValueError, BaseException: See :func:`balance_by_time`.
    """
    return _balance(
        "memory",
        model,
        module,
        sample,
        device,
        stages,
        device_memory,
        chunks=chunks,
        activation_checkpointing=activation_checkpointing,
        microbatching=microbatching,
        optimizer=optimizer,
    )


def _balance(
    criterion: str,
    model: nn.Module,
    module: str | None,
    sample: Any,
    device: str | torch.device,
    stages: int,
    device_memory: float | Sequence[float] | None,
    **settings: Any,
) -> list[int]:
    check_chunks(settings["chunks"])
    check_activation_checkpointing(settings["activation_checkpointing"])
    check_microbatching(settings["microbatching"])
    memory = _memory_of_each(device_memory, stages)
    measuring = Measuring.of_model(model, module, sample, device, stages, memory=memory, **settings)
    return list(balances_for(measuring.modules, [criterion], measuring, "last")[0])


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
