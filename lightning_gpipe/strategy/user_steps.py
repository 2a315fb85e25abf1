"""The steps of a LightningModule with a pipeline, from setup to teardown.

A step of the user's code must call the pipeline: the user is told if it goes around it, and the
processes of the pipeline compare notes if one of them runs no mini-batch. With most schedules
``training_step`` is called for each micro-batch instead of once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.plugins import Precision

from lightning_gpipe.core.schedules import is_by_micro_batch
from lightning_gpipe.distributed import SameSteps
from lightning_gpipe.strategy.bypass import BypassCheck
from lightning_gpipe.strategy.micro_batch_steps import MicroBatchSteps
from lightning_gpipe.strategy.pipelined import PipelinedModule, report


class UserSteps:
    """Runs the steps of a LightningModule.

    Args:
        module: The LightningModule.
        piped: The pipelines in it.
        verify: Whether to verify the first training batch, if each micro-batch has a loss.
    """

    def __init__(self, module: L.LightningModule, piped: PipelinedModule, *, verify: bool) -> None:
        self._module = module
        self._piped = piped
        self._checks = [BypassCheck(module, each, piped.found) for each in piped.found]
        self._in_step: SameSteps | None = None  # with the other processes of the pipeline
        if piped.pipeline.layout.spread:
            self._in_step = SameSteps(module, piped.pipeline)
        self._by_micro_batch: MicroBatchSteps | None = None
        if is_by_micro_batch(piped.schedule):
            on_verdict = report if verify else None
            self._by_micro_batch = MicroBatchSteps(
                piped.schedule, module, piped.pipeline, on_verdict
            )

    def training(
        self,
        step: Callable[..., Any],
        precision: Precision,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Return the result of ``training_step`` for a batch.

        Args:
            step: Calls it once, for the whole batch.
            precision: The Trainer's precision plugin.
            args: The batch, and other arguments of the step.
            kwargs: Named arguments of the step.

        Raises:
            RuntimeError: If the step went around the pipeline.
            OutOfStep: If it ran no mini-batch, and another process did.
        """
        if self._by_micro_batch is not None:
            step = partial(self._by_micro_batch.run, precision)
        run: Callable[[], Any] = partial(step, *args, **kwargs)
        automatic = self._module.automatic_optimization
        for check in self._checks:
            run = partial(check.training, run, automatic=automatic)
        result = run() if self._in_step is None else self._in_step.training(run)
        self._piped.say_ways()
        return result

    def evaluation(self, name: str, run: Callable[[], Any]) -> Any:
        for check in self._checks:
            run = partial(check.evaluation, name, run)
        return run() if self._in_step is None else self._in_step.evaluation(run)
