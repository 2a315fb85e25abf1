"""Methods of the user's module and callbacks, replaced while there is a pipeline.

Layers must not log: they would do so for each micro-batch and recomputation, on a worker's thread.
Finetuning callbacks compare parameters by ``torch.equal``, which raises if their devices differ; so
tensors are compared on the device of the first, or by identity where no process has all values.
DeviceStatsMonitor and ThroughputMonitor assume that a process has one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from re import fullmatch
from typing import Any

import lightning as L
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    DeviceStatsMonitor,
    ThroughputMonitor,
)
from lightning.pytorch.strategies import Strategy
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_gpipe.core.faithful import Journal
from lightning_gpipe.core.layout import Layout
from lightning_gpipe.core.run import in_layers

_STEP = Strategy.training_step.__code__  # no layer calls it
_NORM = r"grad_.+_norm_total"  # as Lightning names it, whose value is a tensor; ours is a float


def guard_logs(root: L.LightningModule, changes: Journal, *, split: bool) -> None:
    """Refuse ``log`` by layers and, if stages are ``split``, norms of one process's gradients."""
    for module in root.modules():
        if isinstance(module, L.LightningModule):
            changes.write([(vars(module), "log", _GuardedLog(module, split))])


class _GuardedLog:
    def __init__(self, module: L.LightningModule, split: bool) -> None:
        self._module = module
        self._split = split
        self._log = module.log

    def __call__(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if in_layers(outside=_STEP):
            raise RuntimeError(
                f"a layer of the pipeline must not call log: got log({name!r}) of "
                f"{type(self._module).__name__}, which would log each micro-batch, and again when "
                "it is recomputed. Return the value from the layers, and log it in training_step."
            )
        if self._split and isinstance(value, torch.Tensor) and fullmatch(_NORM, name):
            raise RuntimeError(
                "a norm must be that of the gradients of all stages, and grad_norm of "
                f"lightning.pytorch.utilities has those of this process only: got log({name!r}). "
                "Write self.trainer.strategy.grad_norm(self)."
            )
        self._log(name, value, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, "log")  # a copy has the method of its class


def adapt_callbacks(
    callbacks: Iterable[Callback], changes: Journal, layout: Layout, replicas: int, *, split: bool
) -> None:
    """Let callbacks that finetune or monitor do so on all devices of a pipeline.

    With ``split``, a process has the values of some parameters only.
    """
    others = [device for device in dict.fromkeys(layout.devices_here) if device != layout.outside]
    for callback in callbacks:
        if isinstance(callback, BaseFinetuning):
            function = partial(_compare_across_devices, callback.finetune_function, split)
            changes.write([(vars(callback), "finetune_function", function)])
        elif isinstance(callback, DeviceStatsMonitor) and others:
            log = partial(_log_all, callback, callback._get_and_log_device_stats, others)
            changes.write([(vars(callback), "_get_and_log_device_stats", log)])
        elif isinstance(callback, ThroughputMonitor):
            for throughput in callback._throughputs.values():
                throughput.world_size = replicas  # no batch is counted twice
                if callback.available_flops:
                    throughput.available_flops = len(layout.devices) * callback.available_flops


def _compare_across_devices(function: Callable[..., None], split: bool, *args: Any) -> None:
    with _EqualAcrossDevices(by_identity=split):
        function(*args)


class _EqualAcrossDevices(TorchFunctionMode):
    def __init__(self, *, by_identity: bool) -> None:
        super().__init__()
        self._by_identity = by_identity  # so that all processes add the same parameters

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.equal:
            one, other = args
            if self._by_identity:
                return one is other
            args = one, other.to(one.device)
        return func(*args, **(kwargs or {}))


def _log_all(
    callback: DeviceStatsMonitor,
    log: Callable[[Trainer, str], None],
    others: Sequence[torch.device],
    trainer: Trainer,
    key: str,
) -> None:
    """Log the statistics of the root device as they are, and of the others under their names."""
    log(trainer, key)
    if not trainer._logger_connector.should_update_logs:
        return
    prefix = f"{type(callback).__qualname__}.{key}"
    step = trainer.fit_loop.epoch_loop._batches_that_stepped
    for device in others:
        stats = trainer.accelerator.get_device_stats(device)
        for logger in trainer.loggers:
            of_device = f"{prefix}{logger.group_separator}{device}{logger.group_separator}"
            logger.log_metrics({of_device + name: x for name, x in stats.items()}, step=step)
