"""Balances as functions: lists of ints, to print, edit and write into a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lightning_gpipe.core.balance import parameter_costs, solve
from lightning_gpipe.core.data import MicroBatching
from lightning_gpipe.core.layout import check_enough_layers, check_sequential, layers_of
from lightning_gpipe.core.pipeline.choose.balancing import balances_for
from lightning_gpipe.core.pipeline.choose.measuring import LayerMeasurement
from lightning_gpipe.core.profile import Optimizers
from lightning_gpipe.core.schedules import ActivationCheckpointing


def balance_by_parameters(module: nn.Sequential, stages: int) -> list[int]:
    """Balance the layers so that the stage with the most parameters has as few as possible.

    Example::

        layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
        balance_by_parameters(layers, stages=4)  # [2, 2, 1, 1]

    The number of parameters is a good measure of the memory of a stage, and of its running time if
    the layers are of one kind. No layer is run, so the module may be on the ``meta`` device.

    Returns:
        The number of layers of each stage, first to last.

    Raises:
        TypeError, ValueError: If the module cannot be cut, or not into this number of stages.
    """
    check_sequential(module)
    layers = layers_of(module)
    check_enough_layers(len(layers), stages)
    return solve(parameter_costs(layers.values()), stages)


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

    Each layer is measured by itself, see :func:`~lightning_gpipe.profile`. The rest of the model
    does not count: it runs before and after, while all stages wait.

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
    measuring = LayerMeasurement.of_model(
        model,
        module,
        sample,
        [torch.device(device)] * stages,
        chunks=chunks,
        activation_checkpointing=activation_checkpointing,
        microbatching=microbatching,
        optimizer=optimizer,
        memory=_memory_of_each(device_memory, stages),
        by_rows=False,
    )
    return list(balances_for(measuring, ["time"], "last")[0])


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

    Parameters, gradients, optimizer state and buffers count, and tensors saved for backward at the
    peak of a mini-batch; on the last device also the rest of the model.

    See :func:`balance_by_time` for the arguments, the result and errors. Micro-batches that are
    recomputed save nothing.
    """
    measuring = LayerMeasurement.of_model(
        model,
        module,
        sample,
        [torch.device(device)] * stages,
        chunks=chunks,
        activation_checkpointing=activation_checkpointing,
        microbatching=microbatching,
        optimizer=optimizer,
        memory=_memory_of_each(device_memory, stages),
        by_rows=False,
    )
    return list(balances_for(measuring, ["memory"], "last")[0])


def _memory_of_each(device_memory: float | Sequence[float] | None, stages: int) -> Sequence[float]:
    if device_memory is None:
        return ()
    if isinstance(device_memory, str):
        raise TypeError(
            "device_memory must be a number of bytes, or a list of them: got "
            f"{device_memory!r}. Write 24 * 2**30 for 24 GiB."
        )
    if isinstance(device_memory, float | int):
        return [device_memory] * stages
    if len(device_memory) != stages:
        raise ValueError(
            "device_memory must have the bytes of each stage's device, or be one number for all: "
            f"got {len(device_memory)} for {stages} stages."
        )
    return device_memory
