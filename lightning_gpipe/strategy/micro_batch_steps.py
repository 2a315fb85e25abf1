"""Runs training_step for each micro-batch, as one step of Lightning's loop.

The pipeline's engine runs the steps as coroutines. Lightning still gets what it expects of one
step: a result, values that are logged once, a loss that a gradient scaler may scale.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torchmetrics import Metric

from lightning_gpipe.core.pipeline import GPipe, MicroBatchStepping, Outcome
from lightning_gpipe.core.run import LOSS_WEIGHT, in_layers
from lightning_gpipe.core.schedules import ByMicroBatch
from lightning_gpipe.core.verify import verify_step, verify_step_sample
from lightning_gpipe.strategy.pipelined import report

_SIGNATURE = inspect.signature(L.LightningModule.log)

Arguments = Mapping[str, Any]  # of a call of log


class MicroBatchSteps:
    """Runs training_step for each micro-batch.

    Args:
        schedule: The schedule's name, other than ``"fill_drain"``.
        module: The LightningModule.
        pipeline: The pipeline in it.
        verify: Whether to verify the first batch, or a few rows of it.

    Raises:
        ValueError: If the schedule does not fit the pipeline.
    """

    def __init__(
        self,
        schedule: ByMicroBatch,
        module: L.LightningModule,
        pipeline: GPipe,
        verify: bool | Literal["sample"] = False,
    ) -> None:
        self._schedule = schedule
        self._verify: bool | Literal["sample"] = verify
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

        # The gradient that the loop's backward of the loss will start from.
        one = torch.ones((), device=self._pipeline.layout.outside)
        scaler = getattr(precision, "scaler", None)
        scaled: Tensor = one if scaler is None else scaler.scale(one)
        scale = scaled / module.trainer.accumulate_grad_batches
        self._verify_first(step, batch, precision, scale)
        _drop_old_gradients(module)
        logs = CollectedLogs(module, lambda: stepping.current)
        with precision.train_step_context(), logs:
            outcome = stepping.run(step, batch, around=module.modules(), scale=scale)
        logs.write(outcome.rows or [1] * len(outcome.results))
        return _result_of(outcome)

    def _verify_first(
        self, step: Callable[[Any], Any], batch: Any, precision: Precision, scale: Tensor
    ) -> None:
        """Verify the first batch that is not skipped, or a few rows of it; log nothing."""
        module, verify = self._module, self._verify
        sample = verify == "sample"
        self._verify = False
        if not verify or (sample and module.global_step):
            return
        with precision.train_step_context(), CollectedLogs(module, lambda: 0):
            parity = (verify_step_sample if sample else verify_step)(
                self._pipeline, step, batch, schedule=self._schedule, around=module, scale=scale
            )
        if parity is not None:
            for verdict in parity.verdicts:
                report(verdict)
        elif not sample:
            self._verify = verify


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


def _result_of(outcome: Outcome) -> Any:
    """The result of a step, for callbacks and for Lightning's own loop.

    A dict has the loss of the batch; its other tensors are concatenated along dim 0, and numbers
    averaged, weighted by rows. Other values become a list with an entry for each micro-batch,
    unless all are equal.
    """
    first = outcome.results[0]
    if outcome.loss is None or not isinstance(first, Mapping):
        return outcome.loss
    rows = outcome.rows or [1] * len(outcome.results)
    others = {
        key: _joined([result.get(key) for result in outcome.results], rows)
        for key in first
        if key not in ("loss", LOSS_WEIGHT)
    }
    return {"loss": outcome.loss, **others}


def _joined(values: Sequence[Any], rows: Sequence[int]) -> Any:
    first = values[0]
    if isinstance(first, Mapping):
        return {key: _joined([value[key] for value in values], rows) for key in first}
    if all(isinstance(value, Tensor) and value.dim() > 0 for value in values):
        return torch.cat(list(values))
    if all(map(_is_number, values)):
        total = sum(rows)
        return sum(value * (size / total) for value, size in zip(values, rows, strict=True))
    if not any(isinstance(value, Tensor) for value in values):
        if all(value == first for value in values):
            return first
        if all(isinstance(value, list) for value in values):
            return [entry for value in values for entry in value]
    return list(values)


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0 and value.is_floating_point()
    return isinstance(value, float)


class CollectedLogs:
    """Stands in for the ``log`` of a LightningModule while its step runs for micro-batches.

    The steps are suspended and go on in turns, so the last call does not have the value of the
    batch. So the calls are collected, and combined as the step would have reduced its rows: means
    weighted by rows, or by the ``batch_size`` in the calls.

    Args:
        module: The LightningModule.
        current: Returns the index of the micro-batch whose step runs.
    """

    def __init__(self, module: L.LightningModule, current: Callable[[], int]) -> None:
        self._module = module
        self._current = current
        self._log: Callable[..., None] = module.log
        self._own = module.__dict__.get("log")
        # By the name of the value: for its first call in a step, its second ..., by micro-batch.
        self._calls: dict[str, list[dict[int, Arguments]]] = {}

    def __enter__(self) -> None:
        self._module.__dict__["log"] = self

    def __exit__(self, *error: object) -> None:
        if self._own is None:
            del self._module.__dict__["log"]
        else:
            self._module.__dict__["log"] = self._own

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if in_layers():
            self._log(*args, **kwargs)  # which refuses it
        call = dict(_SIGNATURE.bind(self._module, *args, **kwargs).arguments)
        del call["self"]
        value = call["value"]
        call["value"] = value.detach() if isinstance(value, Tensor) else value
        i = self._current()
        calls = self._calls.setdefault(call["name"], [])
        for of_micro_batches in calls:
            if i not in of_micro_batches:
                of_micro_batches[i] = call
                return
        calls.append({i: call})

    def write(self, rows: Sequence[int]) -> None:
        for calls in self._calls.values():
            for of_micro_batches in calls:
                self._log(**_combined(of_micro_batches, rows))


def _combined(calls: Mapping[int, Arguments], rows: Sequence[int]) -> Arguments:
    order = sorted(calls)
    last = calls[order[-1]]
    sizes: list[Any] = [calls[i].get("batch_size") for i in order]
    arguments, weights = dict(last), [float(rows[i]) for i in order]
    if None not in sizes:
        arguments["batch_size"] = sum(sizes)
        weights = list(map(float, sizes))
    if not isinstance(last["value"], Metric):
        values = [calls[i]["value"] for i in order]
        arguments["value"] = _reduced(last.get("reduce_fx", "mean"), values, weights)
    return arguments


def _reduced(by: Any, values: Sequence[Any], weights: Sequence[float]) -> Any:
    if len(values) == 1:
        return values[0]
    tensors = torch.stack([torch.as_tensor(value, dtype=_dtype(value)) for value in values])
    match getattr(by, "__name__", by):
        case "sum":
            return tensors.sum(0)
        case "min":
            return tensors.amin(0)
        case "max":
            return tensors.amax(0)
        case _:
            share = torch.tensor(weights, dtype=tensors.dtype, device=tensors.device)
            return torch.tensordot(share / share.sum(), tensors, dims=1)


def _dtype(value: Any) -> torch.dtype:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.dtype
    return torch.get_default_dtype()
