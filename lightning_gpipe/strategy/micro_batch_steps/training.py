"""Runs training_step for each micro-batch, as one step of Lightning's loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.plugins import Precision
from torch import Tensor

from lightning_gpipe.core.pipeline import GPipe, MicroBatchStepping
from lightning_gpipe.core.run import greenlets
from lightning_gpipe.core.schedules import (
    ActivationCheckpointing,
    ByMicroBatch,
    check_schedule_name,
    is_by_micro_batch,
)
from lightning_gpipe.core.verify import Verdict, verify_step
from lightning_gpipe.strategy.micro_batch_steps.logs import CollectedLogs
from lightning_gpipe.strategy.micro_batch_steps.old_gradients import drop_old_gradients
from lightning_gpipe.strategy.micro_batch_steps.results import result_of


def check_schedule(schedule: str, processes: str, replicas: int) -> None:
    """Refuse an unknown schedule, or one that other arguments do not allow.

    Raises:
        ValueError: Names the argument.
        ModuleNotFoundError: If it needs greenlet, which is not installed.
    """
    check_schedule_name(schedule)
    if schedule != "auto" and not is_by_micro_batch(schedule):
        return
    several = [f"processes={processes!r}"] if processes != "single" else []
    several += [f"replicas={replicas}"] if replicas != 1 else []
    if several:
        raise ValueError(
            f"schedule={schedule!r} runs in one process: got "
            f"{' and '.join(several)}. Leave that out, or write schedule='fill_drain'."
        )
    greenlets()


def checkpointing_for(
    checkpointing: ActivationCheckpointing | Literal["auto"] | None, schedule: str
) -> ActivationCheckpointing | Literal["auto"]:
    """The argument ``activation_checkpointing``, or the default for a schedule.

    With a loss for each micro-batch few of them are alive at a time, so none need be recomputed. If
    the schedule is planned, so is this.
    """
    if checkpointing is not None:
        return checkpointing
    if schedule == "auto":
        return "auto"
    return "never" if is_by_micro_batch(schedule) else "except_last"


class MicroBatchSteps:
    """Runs training_step for each micro-batch.

    Args:
        schedule: The schedule's name, other than ``"fill_drain"``.
        module: The LightningModule.
        pipeline: The pipeline in it.
        report: Called with each verdict on the first batch; None does not verify it.

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
        self._stepping = MicroBatchStepping(pipeline.only, schedule)

    def run(self, precision: Precision, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run training_step for each micro-batch, and return its result for the batch.

        Args:
            precision: The Trainer's precision plugin.
            batch: The batch.
            args: Other arguments of training_step.
            kwargs: Its named arguments.
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
        """Verify the first batch that is not skipped, if the user wants that; log nothing."""
        report, self._report = self._report, None
        if report is None:
            return
        module = self._module
        with precision.train_step_context(), CollectedLogs(module, lambda: 0):
            parity = verify_step(
                self._pipeline, step, batch, schedule=self._schedule, around=module, scale=scale
            )
        if parity is None:
            self._report = report
            return
        for verdict in parity.verdicts:
            report(verdict)

    def _scale(self, precision: Precision) -> Tensor:
        """The gradient that the loop's backward of the loss will start from."""
        one = torch.ones((), device=self._pipeline.layout.outside)
        scaler = getattr(precision, "scaler", None)
        scaled: Tensor = one if scaler is None else scaler.scale(one)
        return scaled / self._module.trainer.accumulate_grad_batches
