"""Runs training_step for each micro-batch, with the effects of one step of Lightning's loop."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torchmetrics.aggregation import BaseAggregator, MeanMetric
from torchmetrics.wrappers import Running

from lightning_gpipe.core.faithful import Attributes, Contents, Journal, Write
from lightning_gpipe.core.layout import is_user_object
from lightning_gpipe.core.pipeline import GPipe, MicroBatchStepping, Outcome
from lightning_gpipe.core.schedules import Block, ByMicroBatch
from lightning_gpipe.core.verify import verify_step, verify_step_sample
from lightning_gpipe.strategy.pipelined import report
from lightning_gpipe.strategy.step_logs import BatchMetrics, CollectedLogs
from lightning_gpipe.strategy.step_results import result_of

_NAMES = 8  # in a warning

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
        self._watching = True  # until a batch has several micro-batches
        self._means: set[str] = set()  # the names of means that may be those of batches
        self._numbers: set[int] = set()  # of micro-batches
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
        changed: set[str] = set()
        changes: AbstractContextManager[None] = nullcontext()
        if self._watching:
            changes = _noting_changes(module, self._layers(), batch, pieces, changed, self._means)
        metrics = self._metrics.watched(module.modules())
        with precision.train_step_context(), logs.collecting(), metrics, changes:
            run = partial(stepping.run, step, batch, modules=module.modules(), scale=scale)
            outcome = self._in_wrapper(run)
        self._watching &= len(pieces) < 2
        self._warn_of(changed, len(pieces), outcome)
        with precision.train_step_context():
            logs.write(outcome, self._metrics)
        return result_of(outcome, [*args, *kwargs.values()])

    def _warn_of(self, changed: set[str], m: int, outcome: Outcome) -> None:
        """Warn of changes that each of m steps makes, and one step makes once.

        A mean of all micro-batches is that of all batches as long as each counts as much.
        """
        self._numbers.add(m)
        equal = m < 2 or (
            outcome.rows is not None and len({*outcome.rows}) == len({*outcome.weights}) == 1
        )
        names = changed if m > 1 else set()
        if not equal or len(self._numbers) > 1:
            names = names | self._means
            self._means.clear()
        if names:
            rank_zero_warn(
                "training_step must leave nothing on the module or in the batch when it runs for "
                f"each micro-batch: each has changed {_listed(sorted(names))}. Keep values of "
                "the batch in on_train_batch_end, log the loss itself in place of a metric of it, "
                "make layers with statistics, such as batch norms, part of the pipeline, or write "
                "schedule='fill_drain'."
            )

    def _layers(self) -> set[nn.Module]:
        return {module for stage in self._pipeline.stages for module in stage.modules}

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
        with (
            precision.train_step_context(),
            CollectedLogs(module, lambda: 0).collecting(),
            Journal().changed([(Attributes(trainer), "loggers", silent)]),
        ):
            parity = (verify_step_sample if sample else verify_step)(
                self._pipeline, step, batch, schedule=self._schedule, around=module, scale=scale
            )
        if parity is not None:
            for verdict in parity.verdicts:
                report(verdict)
        elif not sample:
            self._verify = verify


@contextmanager
def _noting_changes(
    module: L.LightningModule,
    layers: Collection[nn.Module],
    batch: Any,
    pieces: Sequence[Any],
    changed: set[str],
    means: set[str],
) -> Iterator[None]:
    """Add the names of what a step changes on the module or in a batch; those of means apart."""
    before = {name: (x, _contents_of(x)) for name, x in _values_on(module, layers)}
    with Journal().changed(_noting_aggregates(module, changed, means)):
        yield
    after = dict(_values_on(module, layers))
    same = {
        name
        for name, (x, contents) in before.items()
        if after.get(name) is x and not contents.moved(compared=False)
    }
    changed |= after.keys() - same
    for piece in pieces:
        if isinstance(piece, dict):
            changed |= {f"batch[{key!r}]" for key in piece.keys() ^ batch.keys()}


def _values_on(
    module: L.LightningModule, layers: Collection[nn.Module]
) -> Iterator[tuple[str, Any]]:
    """Yield attributes that are not Lightning's own, parameters, and buffers around the layers."""
    lightning = {*vars(L.LightningModule()), "log"}
    yield from ((f"self.{x}", value) for x, value in vars(module).items() if x not in lightning)
    for path, each in module.named_modules(prefix="self"):
        yield from ((f"{path}.{x}", tensor) for x, tensor in each._parameters.items())
        if each not in layers:
            yield from ((f"{path}.{x}", tensor) for x, tensor in each._buffers.items())


def _noting_aggregates(module: nn.Module, changed: set[str], means: set[str]) -> Iterator[Write]:
    """Yield changes by which sums, means and extremes of single values add their names.

    Single values are those of micro-batches. A running mean has a window of so many of them.
    """
    running = {x for each in module.modules() if isinstance(each, Running) for x in each.modules()}

    def noting(name: str, names: set[str], update: Callable[..., None]) -> Callable[..., None]:
        def noted(value: Any, *weight: Any, **named: Any) -> None:
            if not (weight or named or (isinstance(value, Tensor) and value.dim())):
                names.add(name)
            update(value, *weight, **named)

        return noted

    for path, each in module.named_modules(prefix="self"):
        if isinstance(each, BaseAggregator):
            mean = type(each) is MeanMetric and each not in running
            yield vars(each), "update", noting(path, means if mean else changed, each.update)


def _listed(names: Sequence[str]) -> str:
    more = [f"{len(names) - _NAMES} more"] if len(names) > _NAMES else []
    return ", ".join([*names[:_NAMES], *more])


def _contents_of(value: Any) -> Contents:
    """Return what edits change: what a container or an object holds, the version of a tensor."""
    return Contents(vars(value) if is_user_object(value) else value, copied=False)


def _drop_old_gradients(module: L.LightningModule) -> None:
    """Drop the last step's gradients before there is a second set; the loop would do so later.

    They stay where accumulation goes on, or a hook or optimizer of the user's acts on the drop.
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
