"""What is adapted of a Trainer and of the LightningModule in it, at the times of a strategy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback

from lightning_gpipe.adapted.averages import Averages
from lightning_gpipe.adapted.device_monitors import DeviceMonitors
from lightning_gpipe.adapted.finetuning import Finetuning
from lightning_gpipe.adapted.guarded_log import GuardedLogs
from lightning_gpipe.adapted.profiling import Profiling, profiler_of
from lightning_gpipe.core.pipeline import GPipe


class AdaptedTrainer:
    """A Trainer whose callbacks, profiler and logs work with several devices.

    The methods have the names of those of a strategy that call them.
    """

    def __init__(self) -> None:
        self._averages = Averages()
        self._finetuning = Finetuning()
        self._monitors = DeviceMonitors()
        self._profiling = Profiling()
        self._logs = GuardedLogs()

    def connect(self, model: LightningModule) -> None:
        """Adapt what begins before all else, if the model is in a Trainer yet."""
        if model._trainer is not None:
            self._profiling.record_threads(profiler_of(model))

    def setup_environment(self, model: LightningModule) -> None:
        """Adapt what begins before the layers are on their devices."""
        self._profiling.record_threads(profiler_of(model))
        self._averages.hold_back(model)

    def setup(
        self,
        model: LightningModule,
        callbacks: Sequence[Callback],
        pipeline: GPipe,
        devices: Sequence[torch.device],
        workers: int,
        replicas: int,
    ) -> None:
        """Adapt everything.

        Args:
            model: The LightningModule.
            callbacks: The Trainer's.
            pipeline: The pipeline in it.
            devices: Those of this process.
            workers: The number of devices of a pipeline, in all its processes.
            replicas: The number of pipelines.
        """
        self._logs.guard(model)
        self._finetuning.adapt(callbacks)
        self._monitors.adapt(callbacks, devices, pipeline.layout.outside, workers, replicas)
        self._profiling.follow(profiler_of(model), pipeline)
        self._averages.follow(model)

    def on_train_batch_start(self, model: LightningModule) -> None:
        """Adapt what callbacks make in the first batch of an epoch."""
        self._averages.follow_in_epoch(model)

    def rebalance(self, model: LightningModule) -> None:
        """Adapt to layers that were moved."""
        self._averages.follow(model)

    def on_exception(self) -> None:
        """End what would outlast a fit that has failed."""
        self._profiling.abort()

    def teardown(self) -> None:
        """Leave everything as the user made it."""
        self._logs.release()
        self._averages.release()
        self._finetuning.release()
        self._monitors.release()
        self._profiling.release()
