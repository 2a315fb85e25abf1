"""Lightning's monitors of the device, with several devices.

DeviceStatsMonitor logs the statistics of the root device, and ThroughputMonitor compares the
throughput of the process with the peak of one device. Here a process has the devices of a pipeline,
and a pipeline may have several processes, which all work on the same batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, DeviceStatsMonitor, ThroughputMonitor

from lightning_gpipe.strategy.adapters.replaced import ReplacedAttributes


def adapt_monitors(
    callbacks: Iterable[Callback],
    replaced: ReplacedAttributes,
    devices: Sequence[torch.device],
    root: torch.device,
    workers: int,
    replicas: int,
) -> None:
    """Let callbacks that monitor a device monitor all.

    Args:
        callbacks: The Trainer's.
        replaced: Restores the callbacks.
        devices: The devices of this process.
        root: The device that they monitor anyway.
        workers: The number of devices of a pipeline, in all its processes.
        replicas: The number of pipelines.
    """
    others = [device for device in dict.fromkeys(devices) if device != root]
    for callback in callbacks:
        if isinstance(callback, DeviceStatsMonitor) and others:
            log = partial(_log_all, callback, callback._get_and_log_device_stats, others)
            replaced.set(callback, "_get_and_log_device_stats", log)
        elif isinstance(callback, ThroughputMonitor):
            _count_all(callback, workers, replicas)


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


def _count_all(callback: ThroughputMonitor, workers: int, replicas: int) -> None:
    """Compare with the peak of all devices of a pipeline, and count no batch twice."""
    for throughput in callback._throughputs.values():
        throughput.world_size = replicas
        if callback.available_flops:
            throughput.available_flops = workers * callback.available_flops
