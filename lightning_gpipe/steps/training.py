"""Runs training_step for each micro-batch, as one step of Lightning's loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.plugins import Precision
from torch import Tensor

from lightning_gpipe.core.pipeline import GPipe, Stepping
from lightning_gpipe.core.plan import (
    ActivationCheckpointing,
    ByMicroBatch,
    check_schedule_name,
)
from lightning_gpipe.core.run import greenlets
from lightning_gpipe.core.verify import Verdict, verify_step
from lightning_gpipe.steps.logs import CollectedLogs
from lightning_gpipe.steps.old_gradients import drop_old_gradients
from lightning_gpipe.steps.results import result_of

FOLDED = "zero_bubble_v"  # whose stages go down the devices and back
_WHOLE = "fill_drain"  # whose loss is that of the batch


def check_schedule(schedule: str, processes: str, replicas: int) -> None:
    """Refuse a schedule that there is not, or that other arguments do not allow.

    Raises:
        ValueError: Names the argument.
        ModuleNotFoundError: If it needs greenlet, which is not installed.
    """
    check_schedule_name(schedule)
    if schedule == _WHOLE:
        return
    found = []
    if processes != "single":
        found.append(f"processes={processes!r}")
    if replicas != 1:
        found.append(f"replicas={replicas}")
    if found:
        raise ValueError(
            f"schedule={schedule!r} runs in one process: got "
            f"{' and '.join(found)}. Leave that out, or write schedule='fill_drain'."
        )
    greenlets()


def checkpointing_for(
    given: ActivationCheckpointing | Literal["auto"] | None, schedule: str
) -> ActivationCheckpointing | Literal["auto"]:
    """Which micro-batches are recomputed, where the user has not said it.

    With a loss for each micro-batch few of them are alive at a time, so none need be recomputed.
    Which schedule is planned, that is planned with.
    """
    if given is not None:
        return given
    if schedule == "auto":
        return "auto"
    return "except_last" if schedule == _WHOLE else "never"


class Steps:
    """Runs training_step for each micro-batch.

    Args:
        schedule: The schedule's name, other than ``"fill_drain"``.
        module: The LightningModule.
        pipeline: The pipeline in it.
        report: Called with what was found by verifying the first batch; None not to verify it.

    Raises:
        ValueError: If the schedule does not fit the pipeline.
    """

    def __init__(
        self,
        schedule: ByMicroBatch,
        module: L.LightningModule,
        pipeline: GPipe,
        report: Callable[[Verdict], None] | None = None,
    ) -> None:
        self._schedule = schedule
        self._report = report
        self._module = module
        self._pipeline = pipeline
        self._stepping = Stepping(pipeline.only, schedule)

    def run(self, precision: Precision, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a step.

        Args:
            precision: The Trainer's precision plugin.
            batch: The batch.
            args: Other arguments of training_step.
            kwargs: Its named arguments.

        Returns:
            What training_step would have returned for the batch.
        """
        module, stepping = self._module, self._stepping
        if not module.automatic_optimization:
            raise RuntimeError(
                f"schedule={self._schedule!r} needs automatic optimization: got "
                "automatic_optimization=False, with which training_step itself calls backward. "
                "Write schedule='fill_drain'."
            )

        def step(piece: Any) -> Any:
            return module.training_step(piece, *args, **kwargs)

        scale = self._scale(precision)
        self._verify(step, batch, precision, scale)
        drop_old_gradients(module)
        logs = CollectedLogs(module, lambda: stepping.current)
        with precision.train_step_context(), logs:
            outcome = stepping.run(step, batch, around=module.modules(), scale=scale)
        logs.write(outcome.rows or [1] * len(outcome.results))
        return result_of(outcome)

    def _verify(
        self, step: Callable[[Any], Any], batch: Any, precision: Precision, scale: Tensor
    ) -> None:
        """Verify the first batch that is not skipped, if that is wanted; nothing is logged."""
        report, self._report = self._report, None
        if report is None:
            return
        module = self._module
        with precision.train_step_context(), CollectedLogs(module, lambda: 0):
            found = verify_step(
                self._pipeline, step, batch, schedule=self._schedule, around=module, scale=scale
            )
        if found is None:
            self._report = report
            return
        for verdict in found.verdicts:
            report(verdict)

    def _scale(self, precision: Precision) -> Tensor:
        """The gradient that the loop's backward of the loss will start from."""
        one = torch.ones((), device=self._pipeline.layout.outside)
        scaler = getattr(precision, "scaler", None)
        scaled = one if scaler is None else scaler.scale(one)
        accumulated: int = self._module.trainer.accumulate_grad_batches
        found: Tensor = scaled / accumulated
        return found
