"""Runs training_step for each micro-batch, as one step of Lightning's loop.

The pipeline's engine runs the steps as coroutines. Lightning still gets what it expects of one
step: a result, values that are logged once, a loss that a gradient scaler may scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_gpipe.core.pipeline import GPipe, MicroBatchStepping
from lightning_gpipe.core.schedules import ByMicroBatch
from lightning_gpipe.core.verify import Verdict, verify_step
from lightning_gpipe.strategy.step_logs import BatchMetrics, CollectedLogs
from lightning_gpipe.strategy.step_results import result_of

Attributes = Mapping[str, tuple[Any, int]]  # the values of attributes, and their lengths


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
        self._metrics = BatchMetrics()
        self._watching = True  # until a batch has several micro-batches
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

        entries: list[str] = []  # of the batch, which the step has made or deleted

        def step(piece: Any) -> Any:
            result = module.training_step(piece, *args, **kwargs)
            if isinstance(piece, dict):
                entries.extend(f"batch[{key!r}]" for key in piece.keys() ^ batch.keys())
            return result

        # The gradient that the loop's backward of the loss will start from.
        one = torch.ones((), device=self._pipeline.layout.outside)
        scaler = getattr(precision, "scaler", None)
        scaled: Tensor = one if scaler is None else scaler.scale(one)
        scale = scaled / module.trainer.accumulate_grad_batches
        self._verify(step, batch, precision, scale)
        _drop_old_gradients(module)
        logs = CollectedLogs(module, lambda: stepping.current)
        before = _attributes(module)
        with precision.train_step_context(), logs, self._metrics.watched(module.modules()):
            outcome = stepping.run(step, batch, around=module.modules(), scale=scale)
        if self._watching and len(outcome.results) > 1:
            self._watching = False
            _warn_of_changes(before, _attributes(module), entries)
        logs.write(outcome, self._metrics)
        return result_of(outcome, [*args, *kwargs.values()])

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


def _attributes(module: L.LightningModule) -> Attributes:
    """Return the attributes that are not Lightning's own, with the lengths of containers."""
    lightning = vars(L.LightningModule())
    return {
        name: (value, len(value) if isinstance(value, list | dict | set) else 0)
        for name, value in vars(module).items()
        if name not in lightning and name != "log"
    }


def _warn_of_changes(before: Attributes, after: Attributes, entries: Iterable[str]) -> None:
    """Warn of what a step has left, which the plain module's leaves once for a batch."""
    new = [
        f"self.{name}"
        for name, (value, size) in after.items()
        if name not in before or before[name][0] is not value or before[name][1] != size
    ]
    if names := ", ".join(dict.fromkeys([*new, *entries])):
        rank_zero_warn(
            "training_step must leave nothing on the module or in the batch when it runs for each "
            f"micro-batch: it has changed {names}, which the other micro-batches changed too. "
            "Return the values, and keep those of the batch in on_train_batch_end, or write "
            "schedule='fill_drain'."
        )


def _drop_old_gradients(module: L.LightningModule) -> None:
    """Drop the gradients of the previous step, which the loop would drop after training_step.

    By then there would be two sets of gradients. The old ones stay where accumulation goes on, or
    a hook or optimizer of the user's acts when they are dropped.
    """
    trainer = module.trainer
    if trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches:
        return
    observed = is_overridden("optimizer_zero_grad", module) or any(
        is_overridden("on_before_zero_grad", owner)
        for owner in (module, *trainer.callbacks)  # type: ignore[attr-defined]  # a connector sets it
    )
    zero_grad = torch.optim.Optimizer.zero_grad
    if not observed and all(type(each).zero_grad is zero_grad for each in trainer.optimizers):
        for optimizer in trainer.optimizers:
            optimizer.zero_grad()
