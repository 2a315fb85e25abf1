"""Runs training_step for each micro-batch, with the effects of one step of Lightning's loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_gpipe.core.faithful import Attributes, patched
from lightning_gpipe.core.pipeline import GPipe, MicroBatchStepping
from lightning_gpipe.core.schedules import Block, ByMicroBatch
from lightning_gpipe.core.verify import verify_step, verify_step_sample
from lightning_gpipe.strategy.optimizer_options import same_options
from lightning_gpipe.strategy.pipelined import report
from lightning_gpipe.strategy.step_changes import StepChanges
from lightning_gpipe.strategy.step_logs import BatchMetrics, CollectedLogs
from lightning_gpipe.strategy.step_results import Sizes, note_sizes, result_of

InWrapper = Callable[[Callable[[], Any]], Any]


class MicroBatchSteps:
    """Runs training_step for each micro-batch, by a schedule other than ``"fill_drain"``.

    ``verify`` tells to verify the first batch, or a few rows of it.
    """

    def __init__(
        self,
        schedule: ByMicroBatch | Block,
        module: L.LightningModule,
        pipeline: GPipe,
        verify: bool | Literal["sample"],
        in_wrapper: InWrapper,
    ) -> None:
        self._schedule = schedule
        self._verify: bool | Literal["sample"] = verify
        self._module = module
        self._pipeline = pipeline
        self._in_wrapper = in_wrapper
        self._metrics = BatchMetrics()
        self._no_constants = set[str]()  # the names of results
        self._sizes: Sizes = {}  # of results
        layers = {layer for stage in pipeline.stages for layer in stage.modules}
        self._changes = StepChanges(module, layers)
        self._stepping = MicroBatchStepping(pipeline.only, schedule)

    @property
    def verifies(self) -> bool:
        return bool(self._verify)

    def run(self, precision: Precision, batch: Any, *args: Any, **kwargs: Any) -> Any:
        module, stepping = self._module, self._stepping
        if not module.automatic_optimization:
            raise RuntimeError(
                f"schedule={self._schedule!r} needs automatic optimization: got "
                "automatic_optimization=False, with which training_step itself calls backward. "
                "Write schedule='fill_drain'."
            )
        if isinstance(batch, Iterator):
            raise RuntimeError(
                f"schedule={self._schedule!r} cuts a batch into micro-batches: got an iterator, as "
                "training_step(dataloader_iter) takes. Take the batch, or write "
                "schedule='fill_drain'."
            )

        pieces: list[Any] = []

        def step(piece: Any) -> Any:
            pieces.append(piece)
            return module.training_step(piece, *args, **kwargs)

        # The gradient that the loop's backward of the loss will start from.
        one = torch.ones((), device=self._pipeline.layout.outside)
        scaler = getattr(precision, "scaler", None)
        scaled: Tensor = one if scaler is None else scaler.scale(one)
        scale = scaled / module.trainer.accumulate_grad_batches
        self._verify_first(step, batch, precision, scale)
        _drop_old_gradients(module)
        logs = CollectedLogs(module, lambda: stepping.current)
        pieces.clear()
        metrics, changes = self._metrics.watched(module.modules()), self._changes
        with (
            precision.train_step_context(),
            logs.collecting(),
            metrics,
            changes.noted(batch, pieces),
        ):
            run = partial(stepping.run, step, batch, modules=module.modules(), scale=scale)
            outcome = self._in_wrapper(run)
        self._changes.warn(len(pieces), outcome)
        with precision.train_step_context():
            logs.write(outcome, self._metrics)
        constants = [*args, *kwargs.values(), module.current_epoch, module.global_step]
        return result_of(outcome, constants, self._no_constants, self._sizes)

    def _noted(self, step: Callable[[Any], Any], piece: Any) -> Any:
        """Run ``step``; note what sizes its results have for the rows of ``piece``."""
        result = step(piece)
        division = self._pipeline.only.microbatching.division([piece])
        if division is not None:
            note_sizes(self._sizes, division.sizes[0], result)
        return result

    def _verify_first(
        self, step: Callable[[Any], Any], batch: Any, precision: Precision, scale: Tensor
    ) -> None:
        """Verify the first batch that is not skipped, or a few rows of it; log nothing."""
        module, verify = self._module, self._verify
        sample = verify == "sample"
        self._verify = False
        if not verify or (sample and module.global_step):
            return
        trainer = module.trainer
        silent = [DummyLogger() for _ in trainer.loggers]
        step = partial(self._noted, step)
        with (
            precision.train_step_context(),
            same_options(trainer),
            CollectedLogs(module, lambda: 0).collecting(),
            patched([(Attributes(trainer), "loggers", silent)]),
        ):
            parity = (verify_step_sample if sample else verify_step)(
                self._pipeline, step, batch, schedule=self._schedule, around=module, scale=scale
            )
        if parity is not None:
            for verdict in parity.verdicts:
                report(verdict)
        elif not sample:
            self._verify = verify


def _drop_old_gradients(module: L.LightningModule) -> None:
    """Drop the last step's gradients before there is a second set; the loop would do so later.

    They stay where accumulation goes on, a hook or optimizer of the user's acts on the drop, or the
    loop leaves them as they are, while StochasticWeightAveraging has it skip backwards.
    """
    trainer = module.trainer
    accumulates = trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches
    if accumulates or trainer.fit_loop._skip_backward:
        return
    observed = is_overridden("optimizer_zero_grad", module) or any(
        is_overridden("on_before_zero_grad", owner)
        for owner in (module, *trainer.callbacks)  # type: ignore[attr-defined]  # a connector sets it
    )
    zero_grad = torch.optim.Optimizer.zero_grad
    if not observed and all(type(each).zero_grad is zero_grad for each in trainer.optimizers):
        for optimizer in trainer.optimizers:
            optimizer.zero_grad()
