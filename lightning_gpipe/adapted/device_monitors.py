"""Lightning's monitors of the device, with several devices.

DeviceStatsMonitor logs the statistics of the root device, and ThroughputMonitor compares what the
process computes with what one device could. Here a process has the devices of a pipeline, and a
pipeline may have several processes, which all work on the same batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, DeviceStatsMonitor, ThroughputMonitor


class DeviceMonitors:
    """The monitors of devices among the callbacks, from :meth:`adapt` to :meth:`release`."""

    def __init__(self) -> None:
        self._callbacks: list[DeviceStatsMonitor] = []

    def adapt(
        self,
        callbacks: Iterable[Callback],
        devices: Sequence[torch.device],
        root: torch.device,
        workers: int,
        replicas: int,
    ) -> None:
        """Let those of ``callbacks`` that watch a device watch all.

        Args:
            callbacks: The Trainer's.
            devices: Those of this process.
            root: The one that they watch anyway.
            workers: The number of devices of a pipeline, in all its processes.
            replicas: The number of pipelines.
        """
        others = [device for device in dict.fromkeys(devices) if device != root]
        for callback in callbacks:
            if isinstance(callback, DeviceStatsMonitor) and others:
                log = partial(_log_all, callback, callback._get_and_log_device_stats, others)
                vars(callback)["_get_and_log_device_stats"] = log
                self._callbacks.append(callback)
            elif isinstance(callback, ThroughputMonitor):
                _count_all(callback, workers, replicas)

    def release(self) -> None:
        """Leave the callbacks as the user made them."""
        for callback in self._callbacks:
            vars(callback).pop("_get_and_log_device_stats", None)
        self._callbacks = []


def _log_all(
    callback: DeviceStatsMonitor,
    log: Callable[[Trainer, str], None],
    others: Sequence[torch.device],
    trainer: Trainer,
    key: str,
) -> None:
    """Log the statistics of the root device as they are, those of the others under their names."""
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
    """Compare with what all devices of a pipeline could compute, and count no batch twice."""
    for throughput in callback._throughputs.values():
        throughput.world_size = replicas
        if callback.available_flops:
            throughput.available_flops = workers * callback.available_flops
