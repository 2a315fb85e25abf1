"""The steps of a LightningModule with a pipeline, from setup to teardown.

A step of the user's code is to call the pipeline: the user is told where it goes around it, and the
processes of the pipeline compare where one of them runs no mini-batch. By most schedules
``training_step`` is called for each micro-batch instead of once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.plugins import Precision

from lightning_gpipe.piped import Piped, report
from lightning_gpipe.processes import InStep
from lightning_gpipe.steps import Steps
from lightning_gpipe.watch import Watches


class UserSteps:
    """Runs the steps of a LightningModule.

    Args:
        module: The LightningModule.
        piped: The pipelines in it.
        verify: Whether to verify the first training batch, if each micro-batch has a loss.
    """

    def __init__(self, module: L.LightningModule, piped: Piped, *, verify: bool) -> None:
        self._module = module
        self._piped = piped
        self._watches = Watches(
            module, {taken.path: partial(piped.runs_of, taken) for taken in piped.found}
        )
        self._in_step: InStep | None = None  # with the other processes of the pipeline
        if piped.pipeline.layout.spread:
            self._in_step = InStep(module, piped.pipeline)
        self._by_micro_batch: Steps | None = None
        if piped.schedule != "fill_drain":
            told = report if verify else None
            self._by_micro_batch = Steps(piped.schedule, module, piped.pipeline, told)

    def training(
        self,
        step: Callable[..., Any],
        precision: Precision,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run ``training_step``.

        Args:
            step: Calls it once, for the whole batch.
            precision: The Trainer's precision plugin.
            args: The batch, and other arguments of it.
            kwargs: Its named arguments.

        Returns:
            Its result for the batch.

        Raises:
            RuntimeError: If it went around the pipeline.
            OutOfStep: If it ran no mini-batch, and another process did.
        """
        if self._by_micro_batch is not None:
            step = partial(self._by_micro_batch.run, precision)
        run: Callable[[], Any] = partial(
            self._watches.training,
            partial(step, *args, **kwargs),
            automatic=self._module.automatic_optimization,
        )
        result = run() if self._in_step is None else self._in_step.training(run)
        self._piped.say_ways()
        return result

    def evaluation(self, name: str, step: Callable[[], Any]) -> Any:
        """Run a step of an evaluation.

        Args:
            name: Its name, such as ``"validation_step"``.
            step: Runs it.

        Raises:
            OutOfStep: If it ran no mini-batch, and another process did.
        """
        run = partial(self._watches.evaluation, name, step)
        return run() if self._in_step is None else self._in_step.evaluation(run)
