"""The steps of a LightningModule with a pipeline, from setup to teardown.

A step of the user's code must call the pipeline: the user is told if it goes around it, and the
processes of the pipeline compare notes if one of them runs no mini-batch. With most schedules
``training_step`` is called for each micro-batch instead of once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.plugins import Precision

from lightning_gpipe.core.schedules import is_by_micro_batch
from lightning_gpipe.distributed import run_step
from lightning_gpipe.strategy.bypass import BypassCheck, Count
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
        counts = {taken.path: partial(piped.runs_of, taken) for taken in piped.found}
        total: Count = partial(_sum, [*counts.values()])
        self._checks = [
            BypassCheck(module, path, count, count if len(counts) == 1 else total)
            for path, count in counts.items()
        ]
        self._spread = piped.pipeline.layout.spread
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
        if self._spread:
            run = partial(run_step, self._module, self._piped.pipeline, run, training=True)
        result = run()
        self._piped.say_ways()
        return result

    def evaluation(self, name: str, run: Callable[[], Any]) -> Any:
        """Return the result of an evaluation's step, such as ``"validation_step"``."""
        for check in self._checks:
            run = partial(check.evaluation, name, run)
        if self._spread:
            run = partial(run_step, self._module, self._piped.pipeline, run, training=False)
        return run()


def _sum(counts: Sequence[Count]) -> int:
    return sum(count() for count in counts)
