"""The Trainer's callbacks, profiler and logs, adapted to several devices."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback

from lightning_gpipe.core.pipeline import GPipe
from lightning_gpipe.strategy.adapters.averages import Averages
from lightning_gpipe.strategy.adapters.methods import ReplacedMethods, adapt_callbacks, guard_logs
from lightning_gpipe.strategy.adapters.profiling import Profiling, profiler_of


class AdaptedTrainer:
    """A Trainer whose callbacks, profiler and logs work with several devices.

    The methods have the names of the strategy's hooks that call them.
    """

    def __init__(self) -> None:
        self._averages = Averages()
        self._profiling = Profiling()
        self._replaced = ReplacedMethods()

    def connect(self, model: LightningModule) -> None:
        if model._trainer is not None:
            self._profiling.record_threads(profiler_of(model))

    def setup_environment(self, model: LightningModule) -> None:
        """Adapt what begins before the layers are on their devices."""
        self._profiling.record_threads(profiler_of(model))
        self._averages.hold_back(model)

    def setup(
        self, model: LightningModule, callbacks: Sequence[Callback], pipeline: GPipe, replicas: int
    ) -> None:
        """Adapt everything else to a pipeline, of which there are so many replicas."""
        guard_logs(model, self._replaced)
        adapt_callbacks(callbacks, self._replaced, pipeline.layout, replicas)
        self._profiling.follow(profiler_of(model), pipeline)
        self._averages.follow(model)

    def on_train_batch_start(self, model: LightningModule) -> None:
        self._averages.follow_in_epoch(model)

    def rebalance(self, model: LightningModule) -> None:
        self._averages.follow(model)

    def on_exception(self) -> None:
        self._profiling.abort()

    def teardown(self) -> None:
        self._replaced.restore()
        self._averages.release()
        self._profiling.release()
